"""`foreword serve` with fake workers."""

import sys

from service.locks import AlreadyLocked
from service.serve import AddressInUse, serve
from service.settings import Settings
from service.supervisor import worker_command

if __name__ == "__main__":
    try:
        serve(Settings(), worker_command("tests.service.fake_worker"))
    except (AlreadyLocked, AddressInUse) as error:
        sys.exit(f"{error.code}: {error}")
