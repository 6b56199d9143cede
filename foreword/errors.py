"""How the command line ends when something is wrong: exit 2, the error as JSON on the last line of standard error."""

import json
import sys
from typing import Any, NoReturn

EXIT_REFUSED = 2

# Codes of exceptions that carry none themselves; named here so that the command line alone knows about all of them.
_CODES = {
    "AlreadyLocked": "data_dir_locked",
    "AddressInUse": "address_in_use",
    "AuthError": "auth_error",
    "DatabaseError": "database_error",
    "SchemaTooNew": "database_error",
    "DatabaseUnavailable": "database_error",
    "ValidationError": "invalid_setting",
    "FileNotFoundError": "not_found",
    "PermissionError": "permission_denied",
    "ValueError": "invalid_value",
    "OSError": "os_error",
}


def code_of(error: BaseException) -> str | None:
    """The machine-readable code of `error`, or None for one that nobody expected."""
    code = getattr(error, "code", None)
    if isinstance(code, str):
        return code
    return next((_CODES[kind.__name__] for kind in type(error).__mro__ if kind.__name__ in _CODES), None)


def refuse(code: str, message: str) -> NoReturn:
    error: dict[str, Any] = {"error": {"code": code, "message": message}}
    print(json.dumps(error, ensure_ascii=False), file=sys.stderr)
    raise SystemExit(EXIT_REFUSED)
