"""/v1/documents: progress, policy, events, summary, deletion; the worker is made up."""

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai import OpenAI

from service.queue.base import Job
from tests.service.http_fakes import DIGEST, Server, serving


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("documents")) as server:
        yield server


@pytest.fixture(autouse=True)
def _open_gates(server: Server) -> Iterator[None]:
    yield
    server.worker.prefill_gate.set()
    server.worker.answer_gate.set()
    server.digest = DIGEST


@pytest.fixture
def client(server: Server) -> OpenAI:
    return server.client()


@pytest.fixture
def http(server: Server) -> httpx.Client:
    return server.http


def upload(client: OpenAI, text: str, *, wait: bool = True, **fields: str) -> str:
    file = client.files.create(file=("doc.txt", text.encode()), purpose="user_data", extra_body=fields or None)
    if wait:
        client.files.wait_for_processing(file.id, poll_interval=0.02)
    return file.id


def until(http: httpx.Client, file_id: str, state: str) -> dict[str, Any]:
    deadline = time.monotonic() + 30
    while (document := http.get(f"/v1/documents/{file_id}").json())["state"] != state:
        assert time.monotonic() < deadline, document
        time.sleep(0.02)
    return document


def sse(lines: Iterator[str]) -> list[dict[str, str]]:
    """Events of a stream, comments left out."""
    events: list[dict[str, str]] = [{}]
    for line in lines:
        name, _, value = line.partition(": ")
        if not line and events[-1]:
            events.append({})
        elif name:
            events[-1][name] = value
    return [event for event in events if event]


def test_state_progress_and_figures(client: OpenAI, server: Server, http: httpx.Client) -> None:
    server.worker.prefill_gate.clear()
    file_id = upload(client, "watch me", wait=False)
    running = until(http, file_id, "prefill")
    while running["progress"] == 0:
        running = http.get(f"/v1/documents/{file_id}").json()
    assert (running["progress"], running["eta_s"], running["status"], running["kv"]) == (0.33, 2.0, "uploaded", "none")
    assert running["job"]["state"] == "running"
    server.worker.prefill_gate.set()
    ready = until(http, file_id, "ready")
    assert (ready["object"], ready["progress"], ready["eta_s"], ready["error"]) == ("document", 1.0, None, None)
    assert (ready["num_tokens"], ready["warnings"]) == (8, [])
    assert (ready["density"], ready["recall"]["worst"], ready["cold_ttft_s"]) == (0.4, 0.8, 0.5)
    assert ready["stage_seconds"].keys() == {"upload", "ingest", "prefill"}
    assert (ready["kv"], ready["kv_bytes"]) == ("stored", {"disk": 4096, "host": 0})
    by_document = http.get(f"/v1/documents/{ready['document_id']}").json()
    assert by_document["id"] == file_id


def test_the_head_map_comes_when_it_is_asked_for(client: OpenAI, server: Server, http: httpx.Client) -> None:
    server.worker.prefill_gate.clear()
    file_id = upload(client, "which head is which", wait=False)
    until(http, file_id, "prefill")
    assert http.get(f"/v1/documents/{file_id}?include=head_map").json()["head_map"] is None
    server.worker.prefill_gate.set()
    assert "head_map" not in until(http, file_id, "ready")
    assert http.get(f"/v1/documents/{file_id}?include=head_map").json()["head_map"] == ["d"]
    assert all("head_map" not in document for document in http.get("/v1/documents").json()["data"])
    refused = http.get(f"/v1/documents/{file_id}?include=heads")
    assert refused.status_code == 400
    assert "head_map" in refused.json()["error"]["message"]


def test_kv_none_after_eviction_and_stale_after_a_change_of_model(
    client: OpenAI, server: Server, http: httpx.Client
) -> None:
    file_id = upload(client, "evict me")
    server.digest = "digest-2"
    assert http.get(f"/v1/documents/{file_id}").json()["kv"] == "stale"
    server.digest = None
    assert http.get(f"/v1/documents/{file_id}").json()["kv"] == "stored"
    server.kv.stored.clear()
    document = http.get(f"/v1/documents/{file_id}").json()
    assert (document["kv"], document["state"], document["status"]) == ("none", "ready", "processed")


def test_failed_document_says_why(client: OpenAI, http: httpx.Client) -> None:
    document = http.get(f"/v1/documents/{upload(client, 'BAD')}").json()
    assert (document["state"], document["error"]) == ("error", {"code": "document_corrupt", "message": "it is damaged"})
    for path in ("manifest", "locate?text=x"):
        answer = http.get(f"/v1/documents/{document['id']}/{path}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (422, "document_corrupt")


def test_several_files_make_one_document(http: httpx.Client, server: Server) -> None:
    parts = [("files", ("contract.txt", b"one, ")), ("files", ("annex.txt", b"two"))]
    options = {"options": json.dumps({"kind": "bundle", "expires_after": {"anchor": "created_at", "seconds": 60}})}
    created = http.post("/v1/documents", files=parts, data={"fidelity": "fast", **options}).json()
    assert (created["filename"], created["kind"], created["fidelity"]) == ("contract.txt and 1 more", "bundle", "fast")
    assert created["expires_at"] == created["created_at"] + 60
    document = until(http, created["id"], "ready")
    assert document["num_tokens"] == len("one, two")
    named = http.post("/v1/documents", files=parts, data={"filename": "deal.zip"}).json()
    assert named["filename"] == "deal.zip"
    assert http.post("/v1/documents", files=parts, data={"options": "[1"}).json()["error"]["param"] == "options"


def test_list_pages(client: OpenAI, http: httpx.Client) -> None:
    ids = [upload(client, f"listed {n}") for n in range(3)]
    page = http.get("/v1/documents", params={"limit": 2}).json()
    assert ([d["id"] for d in page["data"]], page["has_more"]) == ([ids[2], ids[1]], True)
    following = http.get("/v1/documents", params={"limit": 1, "after": page["last_id"]}).json()
    assert following["data"][0]["id"] == ids[0]


def test_patch_sets_pin_lifetime_and_expiry(client: OpenAI, server: Server, http: httpx.Client) -> None:
    file_id = upload(client, "keep me")
    holder = f"{http.get(f'/v1/documents/{file_id}').json()['document_id']}:default"
    patched = http.patch(f"/v1/documents/{file_id}", json={"pin": True, "kv_ttl_s": 60, "expires_after_s": 600}).json()
    assert (patched["pin"], patched["kv_ttl_s"]) == (True, 60)
    assert patched["expires_at"] == pytest.approx(time.time() + 600, abs=3)
    assert server.kv.policies[holder] == (60, True)
    # Another handle of the same content keeps its own wishes; KV lives as the more demanding one wants.
    upload(client, "keep me")
    http.patch(f"/v1/documents/{file_id}", json={"pin": False})
    assert server.kv.policies[holder] == (None, False)
    cleared = http.patch(f"/v1/documents/{file_id}", json={"kv_ttl_s": None, "expires_after_s": None}).json()
    assert (cleared["kv_ttl_s"], cleared["expires_at"]) == (None, None)
    renamed = http.patch(f"/v1/documents/{file_id}", json={"filename": "../new\nname.txt"}).json()
    assert renamed["filename"] == "newname.txt"
    for wrong in ({"kv_ttl_s": -1}, {"kv_ttl_s": 1e300}, {"colour": "red"}, {"pin": "maybe"}):
        answer = http.patch(f"/v1/documents/{file_id}", json=wrong)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, next(iter(wrong)))


def test_delete_while_running_cancels(client: OpenAI, server: Server, http: httpx.Client) -> None:
    server.worker.prefill_gate.clear()
    file_id = upload(client, "never mind", wait=False)
    job = _job(server, until(http, file_id, "prefill"))
    assert http.delete(f"/v1/documents/{file_id}").json() == {"id": file_id, "object": "document", "deleted": True}
    assert server.queue.get(job.id).state == "cancelled"
    assert http.get(f"/v1/documents/{file_id}").json()["error"]["code"] == "document_not_found"
    assert not (server.data_dir / "uploads" / file_id).exists()


def _job(server: Server, document: dict[str, Any]) -> Job:
    return server.queue.get(document["job"]["id"])


def test_delete_by_document_takes_all_handles(client: OpenAI, http: httpx.Client) -> None:
    first, second = upload(client, "same content"), upload(client, "same content")
    documents = [http.get(f"/v1/documents/{file_id}").json()["document_id"] for file_id in (first, second)]
    assert documents[0] == documents[1]
    http.delete(f"/v1/documents/{documents[0]}")
    for any_id in (first, second, documents[0]):
        assert http.get(f"/v1/documents/{any_id}").status_code == 404


def test_handle_goes_alone_while_another_refers(client: OpenAI, http: httpx.Client, server: Server) -> None:
    first, second = upload(client, "shared content"), upload(client, "shared content")
    client.files.delete(first)
    assert http.get(f"/v1/documents/{second}").json()["state"] == "ready"
    assert len([name for name in server.worker.prefilled if name.startswith(_document_id(http, second))]) == 1


@pytest.mark.parametrize("path", ["files", "documents"])
def test_pin_goes_with_the_handle_that_asked_for_it(
    client: OpenAI, http: httpx.Client, server: Server, path: str
) -> None:
    first, second = upload(client, f"pinned {path}"), upload(client, f"pinned {path}")
    http.patch(f"/v1/documents/{first}", json={"pin": True})
    holder = f"{_document_id(http, second)}:default"
    assert server.kv.policies[holder] == (None, True)
    http.delete(f"/v1/{path}/{first}")
    assert server.kv.policies[holder] == (None, False)


def _document_id(http: httpx.Client, file_id: str) -> str:
    return str(http.get(f"/v1/documents/{file_id}").json()["document_id"])


def test_manifest(client: OpenAI, server: Server, http: httpx.Client) -> None:
    file_id = upload(client, "manifest")
    manifest = http.get(f"/v1/documents/{file_id}/manifest").json()
    assert (manifest["num_tokens"], manifest["files"][0]["path"]) == (8, "doc.txt")


def test_locate(http: httpx.Client) -> None:
    parts = [("file", ("a.txt", b"first\nthe clause applies\n")), ("file", ("b.txt", b"here the clause applies too"))]
    file_id = http.post("/v1/documents", files=parts).json()["id"]
    until(http, file_id, "ready")
    found = http.get(f"/v1/documents/{file_id}/locate", params={"text": "the clause applies"}).json()
    assert found["object"] == "list"
    assert [(place["filename"], place["line"], place["token_start"]) for place in found["data"]] == [
        ("a.txt", 2, 6),
        ("b.txt", 1, 30),
    ]
    assert found["data"][0]["token_end"] == 6 + len("the clause applies")
    assert http.get(f"/v1/documents/{file_id}/locate", params={"text": "another clause"}).json()["data"] == []
    for wrong in ({}, {"text": ""}, {"text": "x" * 5000}):
        answer = http.get(f"/v1/documents/{file_id}/locate", params=wrong)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "text")


def test_events_of_ingest_and_prefill_then_the_document(client: OpenAI, server: Server, http: httpx.Client) -> None:
    server.worker.prefill_gate.clear()
    file_id = upload(client, "follow me", wait=False)
    lines: list[str] = []
    with http.stream("GET", f"/v1/documents/{file_id}/events") as response:
        for line in response.iter_lines():
            lines.append(line)
            if "0.33" in line:
                server.worker.prefill_gate.set()
    events = sse(iter(lines))
    assert [event["event"] for event in events][-2:] == ["done", "document"]
    assert json.loads(events[-1]["data"])["state"] == "ready"
    ids = [event["id"] for event in events[:-1]]
    stages = [event_id.partition(":")[0] for event_id in ids]
    assert stages == sorted(stages)
    assert {"ingest", "prefill"} == set(stages)
    progress = next(event for event in events if event["event"] == "progress" and event["id"].startswith("prefill"))
    assert json.loads(progress["data"])["progress"] == 0.33

    again = {"Last-Event-ID": progress["id"]}
    with http.stream("GET", f"/v1/documents/{file_id}/events", headers=again) as response:
        rest = sse(response.iter_lines())
    assert rest == events[events.index(progress) + 1 :]


@pytest.mark.parametrize("last", [b"prefill:many", b"ingest:\xb2", b"ingest:" + b"9" * 30])
def test_events_with_a_strange_last_id(client: OpenAI, http: httpx.Client, last: bytes) -> None:
    file_id = upload(client, "strange")
    answer = http.get(f"/v1/documents/{file_id}/events", headers={b"Last-Event-ID": last})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "Last-Event-ID")


def test_summary(client: OpenAI, server: Server, http: httpx.Client) -> None:
    file_id = upload(client, "a long story")
    body = {"length": "short", "focus": "the dates", "language": "German"}
    summary = http.post(f"/v1/documents/{file_id}/summary", json=body).json()
    assert (summary["object"], summary["id"]) == ("document.summary", file_id)
    assert summary["summary"] == "Answer about 1 documents"
    assert summary["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    asked = server.worker.answered[-1]
    question = server.model.prompts.tokenizer.decode(asked["question"])
    assert all(word in question for word in ("two or three sentences", "the dates", "German"))
    assert asked["sampling"]["repetition_penalty"] == 1.1
    assert http.post(f"/v1/documents/{file_id}/summary").json()["finish_reason"] == "stop"
    wrong = http.post(f"/v1/documents/{file_id}/summary", json={"length": "epic"})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "length")


def test_streamed_summary(client: OpenAI, http: httpx.Client) -> None:
    file_id = upload(client, "a long story to stream")
    with http.stream("POST", f"/v1/documents/{file_id}/summary", json={"stream": True}) as response:
        chunks = [json.loads(event["data"]) for event in sse(response.iter_lines()) if event["data"] != "[DONE]"]
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    assert text == "Answer about 1 documents"


CONTRACT = """1. The tenant shall pay the base rent monthly,
and bears the full respon-
sibility for repairs of the \u201cPremises\u201d.
2. Notice must be given in writing.
"""
QUOTING = [
    "The tenant pays: \u201cshall pay   the base rent monthly\u201d, and \u201cmay end the lease",
    ' at any time\u201d. Of the "Premises" it "bears the full responsibility for repairs".\n\n> Notice must be',
    " given in writ",
    "ing.\n> Notice may be given by word of mouth.\n",
]
QUOTING_SHOWN = (
    'The tenant pays: \u201cshall pay   the base rent monthly\u201d, and [\u2026]. Of the "Premises" it'
    ' "bears the full responsibility for repairs".\n\n> Notice must be given in writing.\n'
)


@pytest.mark.parametrize("stream", [False, True])
def test_summary_quotes_only_what_stands_in_the_document(
    client: OpenAI, server: Server, http: httpx.Client, stream: bool
) -> None:
    file_id = upload(client, CONTRACT)
    server.worker.words = QUOTING
    before = _quotes_counted(http)
    try:
        answer = http.post(f"/v1/documents/{file_id}/summary", json={"quotes": 3, "stream": stream})
    finally:
        server.worker.words = []
    if stream:
        chunks = [json.loads(e["data"]) for e in sse(iter(answer.text.splitlines())) if e["data"] != "[DONE]"]
        shown = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
        told = chunks[-1]["foreword"]
    else:
        told = answer.json()
        shown = told["summary"]
        assert told["foreword"].keys() == {"ttft_s", "cache_state", "density", "recall"}
    assert shown == QUOTING_SHOWN
    assert told["quotes_dropped"] == 2
    assert [(quote["quote"], quote["line"]) for quote in told["quotes"]] == [
        ("shall pay   the base rent monthly", 1),
        ("bears the full responsibility for repairs", 2),
        ("Notice must be given in writing", 4),
    ]
    for quote in told["quotes"]:
        assert (quote["file_id"], quote["filename"], quote["page"]) == (file_id, "doc.txt", None)
        assert shown[quote["start_index"] : quote["end_index"]] == quote["quote"]
        # The fake's documents have one token a byte.
        stands = CONTRACT.encode()[quote["token_start"] : quote["token_end"]].decode()
        assert stands.split()[0] == quote["quote"].split()[0]
        assert stands.split()[-1].rstrip(".") == quote["quote"].split()[-1]
    assert _quotes_counted(http) == {"verified": before["verified"] + 3, "dropped": before["dropped"] + 2}
    question = server.model.prompts.tokenizer.decode(server.worker.answered[-1]["question"])
    assert "up to 3 passages" in question


def _quotes_counted(http: httpx.Client) -> dict[str, float]:
    out = {"verified": 0.0, "dropped": 0.0}
    for line in http.get("/metrics").text.splitlines():
        if line.startswith("foreword_summary_quotes_total{"):
            out[line.split('"')[1]] = float(line.rpartition(" ")[2])
    return out


def test_verify(client: OpenAI, http: httpx.Client) -> None:
    file_id = upload(client, "check me")
    report = http.post(f"/v1/documents/{file_id}/verify").json()
    assert (report["ok"], report["blocks"], report["bytes"], report["bad"]) == (True, 2, 4096, [])


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", ""), ("PATCH", ""), ("DELETE", ""), ("GET", "/manifest"), ("GET", "/events"),
        ("POST", "/summary"), ("GET", "/locate?text=x"), ("POST", "/verify"),
    ],
)  # fmt: skip
def test_unknown_document(http: httpx.Client, method: str, path: str) -> None:
    for any_id in ("file-none", "doc-none"):
        answer = http.request(method, f"/v1/documents/{any_id}{path}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "document_not_found")


def test_not_ingested_yet_is_a_conflict_that_a_retry_cannot_mend_at_once(http: httpx.Client, server: Server) -> None:
    server.worker.hold_ingest = True
    file_id = http.post("/v1/documents", files=[("file", ("a.txt", b"unread"))]).json()["id"]
    answer, state = http.get(f"/v1/documents/{file_id}/manifest"), http.get(f"/v1/documents/{file_id}").json()["state"]
    server.worker.hold_ingest = False
    assert state == "ingest"
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "document_not_ready")
    assert answer.headers["x-should-retry"] == "false"
