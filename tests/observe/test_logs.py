"""What the logs of a real run say, at level debug, failures included: who did what for which request, no content."""

import io
import json
import logging
import sqlite3
import sys
import threading
import warnings
from collections.abc import Iterator

import pytest

from service.ingest.reports import began, crashed, log_report
from service.logs import configure_logging, log_fields, log_uncaught, outline
from tests.observe.conftest import MARKERS, REQUEST_ID, TENANTS, WRONG_KEY, Observed


def test_every_line_is_json_with_time_level_and_process(observed: Observed) -> None:
    for line in observed.log_lines():
        assert {"time", "level", "logger", "message", "process"} <= set(line)


def test_one_request_id_from_api_to_worker_and_reading_process(observed: Observed) -> None:
    lines = [line for line in observed.log_lines() if line.get("request_id") == REQUEST_ID]
    loggers = {line["logger"] for line in lines}
    assert loggers >= {"service.middleware", "service.ingest.reports", "service.stages.ingest", "service.scheduler"}
    assert {line["stage"] for line in lines if "stage" in line} == {"ingest", "prefill", "answer"}
    read = [line for line in lines if line["logger"] == "service.ingest.reports"]
    assert "reads 1 sources" in read[0]["message"], "the reading process gave the id back"


def test_no_text_name_question_answer_or_key_in_any_line(observed: Observed) -> None:
    log = observed.log()
    assert len(observed.log_lines()) > 100
    assert '"level": "debug"' in log
    assert "archive_corrupt" in log, "the broken upload is there, by its code"
    for what, marker in MARKERS.items():
        assert marker not in log, what
    for key in (*TENANTS.values(), WRONG_KEY):
        assert key not in log
    assert len(observed.answer) > 3
    assert json.dumps(observed.answer)[1:-1] not in log


def test_names_in_metrics_say_nothing_either(observed: Observed) -> None:
    for marker in (*MARKERS.values(), *TENANTS.values(), WRONG_KEY, "file-", "doc-", "req-"):
        assert marker not in observed.metrics


# --- without a server ----------------------------------------------------------------------------------------------


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    before = (root.handlers[:], root.level, sys.excepthook, threading.excepthook)
    stream = io.StringIO()
    configure_logging("debug", stream)
    try:
        yield stream
    finally:
        root.handlers[:], root.level, sys.excepthook, threading.excepthook = before
        logging.captureWarnings(False)
        for name in ("foreword", "service", "engine", "kernels"):
            logging.getLogger(name).setLevel(logging.NOTSET)


def last(stream: io.StringIO) -> dict:
    return json.loads(stream.getvalue().splitlines()[-1])


def test_an_exception_is_its_kind_and_place_not_its_message(lines: io.StringIO) -> None:
    try:
        try:
            int(MARKERS["document"])
        except ValueError as error:
            raise RuntimeError(f"can't read {error}") from error
    except RuntimeError:
        logging.getLogger("service.x").exception("failed")
    shown = last(lines)["exception"]
    assert MARKERS["document"] not in lines.getvalue()
    assert shown.startswith("RuntimeError\n  tests/observe/test_logs.py:")
    assert "because of ValueError" in shown


def test_what_the_system_says_is_shown() -> None:
    assert outline(OSError(28, "No space left on device", "/secret")) == "OSError: No space left on device"
    assert outline(sqlite3.OperationalError("database is locked")) == "OperationalError: database is locked"


def test_other_libraries_say_nothing_at_debug(lines: io.StringIO) -> None:
    logging.getLogger("pdfminer").debug(MARKERS["document"])
    logging.getLogger("python_multipart").debug(MARKERS["document"])
    assert lines.getvalue() == ""
    logging.getLogger("service.x").debug("ours")
    assert last(lines)["message"] == "ours"


def test_what_ends_a_thread_or_the_process_is_a_line(lines: io.StringIO) -> None:
    log_uncaught()

    def fail() -> None:
        raise ValueError(MARKERS["document"])

    thread = threading.Thread(target=fail, name="reader")
    thread.start()
    thread.join()
    assert (last(lines)["message"], last(lines)["level"]) == ("thread reader ends", "critical")
    try:
        fail()
    except ValueError as error:
        sys.excepthook(ValueError, error, error.__traceback__)
    assert last(lines)["message"] == "the process ends"
    assert MARKERS["document"] not in lines.getvalue()


def test_warnings_are_lines_and_tasks_are_not_shown(lines: io.StringIO) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(True)
        warnings.warn("something is old", stacklevel=1)
        logging.captureWarnings(False)
    assert "something is old" in last(lines)["message"]
    logging.getLogger("asyncio").error("Task exception was never retrieved\nfuture: %s", MARKERS["document"])
    assert MARKERS["document"] not in lines.getvalue()


def test_a_reading_process_can_only_say_fixed_sentences(lines: io.StringIO) -> None:
    request = {"request_id": "req-1", "sources": [1, 2]}
    try:
        {}[MARKERS["document"]]
    except KeyError as error:
        report = json.loads(json.dumps(crashed(request, error)))
    with log_fields(request_id="req-1"):
        log_report(began(request), 77, "req-1")
        assert last(lines)["message"] == "process 77 reads 2 sources"
        log_report(report, 77, "req-1")
        assert last(lines)["message"].startswith("the reading process 77 failed with KeyError at test_logs.py:")
        secret = MARKERS["document"]
        for forged in (
            {"crashed": {"request_id": "req-1", "kind": f"{secret} {secret}", "places": [secret, {"a": secret}]}},
            {"crashed": {"request_id": "req-1", "kind": [secret], "places": secret}},
            {"began": {"request_id": "req-1", "sources": secret}},
            {"began": secret},
            {"began": {"request_id": secret, "sources": 1}},
        ):
            log_report(forged, 77, "req-1")
    assert secret not in lines.getvalue()
    assert {json.loads(line)["request_id"] for line in lines.getvalue().splitlines()} == {"req-1"}
