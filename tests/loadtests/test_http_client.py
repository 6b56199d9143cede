"""The load tests' client: whatever comes back becomes a code, and nothing that is cut off counts as answered."""

import json
from collections.abc import Callable

import httpx
import pytest

from loadtests.http.checks import until_empty
from loadtests.http.client import Client, Leave

DONE = "data: [DONE]\n\n"


def chunk(text: str = "", **more: object) -> str:
    return f"data: {json.dumps({'choices': [{'delta': {'content': text}}], **more})}\n\n"


def client(answer: Callable[[httpx.Request], httpx.Response]) -> Client:
    return Client("http://server", "key", httpx.MockTransport(answer))


def refuse(request: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("nobody listens", request=request)


FIGURES = {"ttft_s": 0.2, "cache_state": "warm_disk"}
STREAMS: dict[str, tuple[str, Leave | None, str, str]] = {
    "whole": (": answer\n\n" + chunk() + chunk("12") + chunk("34", foreword=FIGURES) + DONE, None, "ok", "1234"),
    "cut off": (chunk("12") + chunk("34"), None, "cut_off", "1234"),
    "error in it": (chunk("12") + 'data: {"error": {"code": "answer_failed"}}\n\n', None, "answer_failed", "12"),
    "left in the stream": (chunk("12") + chunk("34") + DONE, "stream", "left", "12"),
    "left in the prefill": (": prefill 3%\n\n" + chunk("12") + DONE, "prefill", "left", ""),
    "nothing to leave": (chunk("12") + DONE, "prefill", "ok", "12"),
}


@pytest.mark.parametrize("name", STREAMS)
def test_streams(name: str) -> None:
    body, leave, code, text = STREAMS[name]
    reply = client(lambda request: httpx.Response(200, text=body)).ask("file-1", "What?", leave=leave)
    assert (reply.code, reply.text) == (code, text)
    assert (reply.ttft_s is None) == (not text)
    if name == "whole":
        assert (reply.cache_state, reply.server_ttft_s) == ("warm_disk", 0.2)


def test_ttft_counts_from_when_a_request_was_due() -> None:
    late = client(lambda request: httpx.Response(200, text=chunk("1") + DONE)).ask("file-1", "What?", arrived_at=0.0)
    assert late.ttft_s is not None
    assert late.seconds >= late.ttft_s > 1.0  # the clock's zero is long ago


ERRORS: dict[str, tuple[Callable[[httpx.Request], httpx.Response], str]] = {
    "ours": (
        lambda request: httpx.Response(429, json={"error": {"code": "rate_limit_exceeded"}}),
        "rate_limit_exceeded",
    ),
    "a proxy's": (lambda request: httpx.Response(502, text="<html>"), "http_502"),
    "no server": (refuse, "ConnectError"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_become_codes(name: str) -> None:
    answer, code = ERRORS[name]
    caller = client(answer)
    assert caller.ask("file-1", "What?").code == code
    assert caller.upload_bytes("a.txt", b"text") == ("", code)
    assert caller.wait("file-1")[1] == code
    assert caller.delete("file-1") == code
    assert caller.get("/v1/files")[1] == code


def test_a_document_that_failed_says_why() -> None:
    failed = {"state": "error", "error": {"code": "unsupported_format"}}
    assert client(lambda request: httpx.Response(200, json=failed)).wait("file-1") == (failed, "unsupported_format")


def test_the_queue_is_empty_when_no_such_job_waits_or_runs() -> None:
    lanes = [{"kind": "prefill", "queued": 0, "running": 1}, {"kind": "answer", "queued": 0, "running": 0}]
    caller = client(lambda request: httpx.Response(200, json={"data": lanes}))
    assert until_empty(caller, ("answer",), 0.2) is not None
    assert until_empty(caller, None, 0.2) is None
    forbidden = client(lambda request: httpx.Response(403, json={"error": {"code": "admin_required"}}))
    with pytest.raises(httpx.HTTPError, match="admin_required"):
        until_empty(forbidden, None, 0.2)
