"""A worker process with the fake engine: everything else is the real thing."""

import sys

from service.worker import main
from tests.service.fake_engine import open_fake_parts

if __name__ == "__main__":
    sys.exit(main(open_fake_parts))
