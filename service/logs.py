"""Logs as one JSON object a line, with the request, job and stage they belong to. Texts of documents never go there.

Nor do keys, questions or answers, at any level: of an exception only its kind and place are logged, since messages may
quote what was being worked on; and other libraries may say at `debug` whatever they like, so only our own loggers do.
"""

import contextvars
import json
import logging
import os
import sqlite3
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, TextIO

PACKAGES = ("foreword", "service", "engine", "kernels")

_fields: contextvars.ContextVar[Mapping[str, Any]] = contextvars.ContextVar("log_fields", default=MappingProxyType({}))

# What every record has; anything else was given as `extra`.
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "color_message"}
_ROOT = f"{Path(__file__).resolve().parent.parent}{os.sep}"


@contextmanager
def log_fields(**fields: Any) -> Iterator[None]:
    """Every log line of this thread or task within the block carries these; None is left out."""
    token = _fields.set({**_fields.get(), **{name: value for name, value in fields.items() if value is not None}})
    try:
        yield
    finally:
        _fields.reset(token)


def current_fields() -> Mapping[str, Any]:
    """For handing on to a process that works for this thread or task."""
    return _fields.get()


def outline(error: BaseException | None) -> str:
    """Kinds and places of an exception and what caused it, innermost first; no message that may quote a document."""
    parts = []
    while error is not None:
        lines = [_named(error)]
        for frame in reversed(traceback.extract_tb(error.__traceback__)):
            lines.append(f"  {frame.filename.removeprefix(_ROOT)}:{frame.lineno} in {frame.name}")
        parts.append("\n".join(lines))
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return "\nbecause of ".join(parts)


def _named(error: BaseException) -> str:
    """Messages of the system and of the database name no content."""
    if isinstance(error, sqlite3.Error):
        return f"{type(error).__name__}: {error}"
    if isinstance(error, OSError) and error.strerror:
        return f"{type(error).__name__}: {error.strerror}"
    return type(error).__name__


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage()
        if record.name == "asyncio":  # its further lines show tasks with their arguments and results
            message = message.partition("\n")[0]
        entry: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": message,
            "process": record.process,
            **_fields.get(),
            **{name: value for name, value in vars(record).items() if name not in _STANDARD},
        }
        if record.exc_info:
            entry["exception"] = outline(record.exc_info[1])
        return json.dumps(entry, ensure_ascii=False, default=str)


def configure_logging(level: str, stream: TextIO | None = None) -> None:
    """Send everything to `stream` (default: standard error). Raises ValueError for an unknown level."""
    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        raise ValueError(f"log level is {level!r}; expected debug, info, warning or error")
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(number, logging.INFO))
    for name in PACKAGES:
        logging.getLogger(name).setLevel(number)
    logging.captureWarnings(True)


def log_uncaught() -> None:
    """In a process of its own: what ends it or a thread of it unforeseen is a log line too, without its message."""
    log = logging.getLogger("service")

    def of_process(kind: type[BaseException], error: BaseException, _: object) -> None:
        log.critical("the process ends", exc_info=error)

    def of_thread(arguments: threading.ExceptHookArgs) -> None:
        name = arguments.thread.name if arguments.thread else "?"
        log.critical("thread %s ends", name, exc_info=arguments.exc_value)

    sys.excepthook = of_process
    threading.excepthook = of_thread
