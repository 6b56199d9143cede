"""/v1/batches with the official client: files of questions become files of answers, also across a crash."""

import hashlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import BadRequestError, NotFoundError, OpenAI

from service import batch_keeper, batch_lines, batches
from service.auth import Key, KeyRing
from service.batch_rows import RowStore
from service.queue.base import FINAL_STATES
from tests.service.bench import until
from tests.service.http_fakes import Server, serving
from tests.service.test_http_durability import kill, process
from tests.service.test_http_webhooks import listening

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    keys = KeyRing(
        [Key(sha256=hashlib.sha256(name.encode()).hexdigest(), tenant=name) for name in ("ann", "bob", "eve")]
    )
    with serving(tmp_path_factory.mktemp("batches"), keys=keys, webhook_allow_private=True) as server:
        yield server


@pytest.fixture(autouse=True)
def _open_gates(server: Server) -> Iterator[None]:
    yield
    server.worker.prefill_gate.set()
    server.worker.answer_gate.set()
    server.worker.answer_error = None


@pytest.fixture
def client(server: Server) -> OpenAI:
    return server.client("ann")


def chat(custom_id: str, *content: Any, **options: Any) -> dict[str, Any]:
    parts = [{"type": "text", "text": "Q"}, *content]
    body = {"model": "default", "messages": [{"role": "user", "content": parts}], **options}
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body}


def begin(client: OpenAI, lines: list[Any], endpoint: str = CHAT, **options: Any) -> Any:
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    file = client.files.create(file=("in.jsonl", text.encode()), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", **options)


def ended(client: OpenAI, batch_id: str) -> Any:
    final = ("completed", "failed", "expired", "cancelled")
    until(lambda: client.batches.retrieve(batch_id).status in final, 40)
    return client.batches.retrieve(batch_id)


def rows(client: OpenAI, file_id: str) -> dict[str, Any]:
    return {row["custom_id"]: row for row in map(json.loads, client.files.content(file_id).text.splitlines())}


def test_chat_batch(client: OpenAI, server: Server) -> None:
    document = client.files.create(file=("doc.txt", b"The number is 4711."), purpose="user_data")
    lines = [chat(f"line-{n}", {"type": "file", "file": {"file_id": document.id}}) for n in range(12)]
    lines += [chat("no-file", {"type": "file", "file": {"file_id": "file-none"}}), chat("strange", tools=[{"x": 1}])]
    batch = begin(client, lines, metadata={"case": "1"})
    assert (batch.object, batch.metadata, batch.endpoint) == ("batch", {"case": "1"}, CHAT)
    assert batch.status in ("validating", "in_progress")
    batch = ended(client, batch.id)
    assert (batch.status, batch.request_counts.to_dict()) == (
        "completed",
        {"total": 14, "completed": 12, "failed": 2},
    )
    assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at < batch.expires_at
    answers, failures = rows(client, batch.output_file_id), rows(client, batch.error_file_id)
    assert answers.keys() == {f"line-{n}" for n in range(12)}
    body = answers["line-0"]["response"]["body"]
    assert (answers["line-0"]["response"]["status_code"], body["object"]) == (200, "chat.completion")
    assert body["choices"][0]["message"]["content"] == "Answer about 1 documents"
    assert batch.usage.output_tokens == 12 * 4
    assert batch.usage.input_tokens_details.cached_tokens > 0
    assert {name: row["response"]["status_code"] for name, row in failures.items()} == {"no-file": 404, "strange": 400}
    assert failures["no-file"]["response"]["body"]["error"]["code"] == "file_not_found"
    assert client.files.retrieve(batch.output_file_id).purpose == "batch_output"
    assert not (server.data_dir / "batches" / batch.id).exists()
    part: Any = {"type": "file", "file": {"file_id": batch.output_file_id}}
    with pytest.raises(BadRequestError, match="only stored"):
        client.chat.completions.create(model="default", messages=[{"role": "user", "content": [part]}])


def test_responses_batch(client: OpenAI) -> None:
    bodies = [{"model": "default", "input": "Q"}, {"model": "default", "input": "Q", "stream": True}]
    lines = [{"custom_id": str(n), "method": "POST", "url": RESPONSES, "body": body} for n, body in enumerate(bodies)]
    batch = ended(client, begin(client, lines, RESPONSES).id)
    body = rows(client, batch.output_file_id)["0"]["response"]["body"]
    assert (body["object"], body["status"]) == ("response", "completed")
    assert body["output"][0]["content"][0]["text"] == "Answer about 0 documents"
    assert rows(client, batch.error_file_id)["1"]["response"]["status_code"] == 400
    assert batch.usage.total_tokens == body["usage"]["total_tokens"]


def test_lines_wait_for_their_documents(client: OpenAI, server: Server) -> None:
    server.worker.prefill_gate.clear()
    document = client.files.create(file=("doc.txt", b"slowly read"), purpose="user_data")
    batch = begin(client, [chat("a", {"type": "file", "file": {"file_id": document.id}})])
    until(lambda: client.batches.retrieve(batch.id).status == "in_progress")
    assert client.batches.retrieve(batch.id).request_counts.completed == 0
    server.worker.prefill_gate.set()
    assert ended(client, batch.id).request_counts.completed == 1


def test_questions_of_people_go_first(client: OpenAI, server: Server) -> None:
    batch = ended(client, begin(client, [chat("a")]).id)
    jobs = [server.queue.get(f"answer-{batch.id}-1")]
    assert jobs[0].priority < 10


@pytest.mark.parametrize(
    ("lines", "code", "line"),
    [
        ([], "empty_file", None),
        (["{}", "nonsense"], "missing_required_parameter", 1),
        (["nonsense"], "invalid_json_line", 1),
        (["[1]"], "invalid_json_line", 1),
        ([chat("a"), chat("a")], "duplicate_custom_id", 2),
        ([{**chat("a"), "method": "GET"}], "invalid_method", 1),
        ([{**chat("a"), "url": RESPONSES}], "mismatched_endpoint", 1),
        ([{**chat("a"), "body": "x"}], "missing_required_parameter", 1),
        ([chat("a"), {**chat("b"), "pad": "x" * (1 << 20)}], "line_too_long", 2),
    ],
)
def test_flawed_files_fail_whole(client: OpenAI, server: Server, lines: list[Any], code: str, line: int | None) -> None:
    before = len(server.worker.answered)
    batch = ended(client, begin(client, lines or ["\n"]).id)
    assert (batch.status, batch.failed_at is not None, batch.output_file_id) == ("failed", True, None)
    flaw = batch.errors.data[0]
    assert (flaw.code, flaw.line) == (code, line)
    assert len(server.worker.answered) == before


def test_too_many_lines(client: OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_lines, "MAX_LINES", 2)
    batch = ended(client, begin(client, [chat(str(n)) for n in range(3)]).id)
    assert [flaw.code for flaw in batch.errors.data] == ["too_many_lines"]


def test_impossible_batches(client: OpenAI, server: Server) -> None:
    document = client.files.create(file=("doc.txt", b"no batch"), purpose="user_data")
    for file_id in (document.id, "file-none"):
        with pytest.raises(BadRequestError) as error:
            client.batches.create(input_file_id=file_id, endpoint=CHAT, completion_window="24h")
        assert error.value.param == "input_file_id"
    with pytest.raises(BadRequestError) as error:
        client.batches.create(input_file_id=file_id, endpoint="/v1/embeddings", completion_window="24h")
    assert error.value.param == "endpoint"
    for attempt in (client.batches.retrieve, client.batches.cancel):
        with pytest.raises(NotFoundError) as missing:
            attempt("batch_none")
        assert missing.value.code == "batch_not_found"


def test_cancel_keeps_what_was_answered(client: OpenAI, server: Server) -> None:
    first = begin(client, [chat("a")])
    ended(client, first.id)
    server.worker.answer_gate.clear()
    batch = begin(client, [chat(f"line-{n}") for n in range(20)])
    until(lambda: len(server.queue.jobs("running", limit=99)) == 8)
    assert client.batches.cancel(batch.id).status == "cancelling"
    batch = ended(client, batch.id)
    assert (batch.status, batch.output_file_id) == ("cancelled", None)
    assert {row["error"]["code"] for row in rows(client, batch.error_file_id).values()} == {"batch_cancelled"}
    assert batch.request_counts.failed == 20
    assert batch.cancelling_at <= batch.cancelled_at
    until(lambda: not server.queue.jobs("running", limit=99))
    assert client.batches.cancel(batch.id).status == "cancelled"
    assert client.batches.cancel(first.id).status == "completed"


def test_a_batch_expires(client: OpenAI, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "WINDOW_S", 0.5)
    server.worker.answer_gate.clear()
    batch = ended(client, begin(client, [chat("a"), chat("b")]).id)
    assert (batch.status, batch.expired_at is not None) == ("expired", True)
    assert {row["error"]["code"] for row in rows(client, batch.error_file_id).values()} == {"batch_expired"}


def test_a_tenant_with_many_batches_holds_up_nobodys(client: OpenAI, server: Server) -> None:
    eve = server.client("eve")
    server.worker.answer_gate.clear()
    many = [begin(client, [chat("a")]).id for _ in range(batch_keeper.MOST_A_TENANT + 1)]

    def under_way() -> int:
        return sum(client.batches.retrieve(name).status == "in_progress" for name in many)

    until(lambda: under_way() == batch_keeper.MOST_A_TENANT)
    other = begin(eve, [chat("b")]).id
    until(lambda: eve.batches.retrieve(other).status == "in_progress")
    assert under_way() == batch_keeper.MOST_A_TENANT
    server.worker.answer_gate.set()
    assert {ended(client, name).status for name in many} == {"completed"}
    assert ended(eve, other).status == "completed"


def test_a_batch_whose_questions_are_gone_fails_and_leaves_nothing(client: OpenAI, server: Server) -> None:
    """Its file was deleted, and then the process that asked them died."""
    done = server.objects.get("batch", "ann", ended(client, begin(client, [chat("a")]).id).id)
    folder = server.data_dir / "batches" / "batch_orphan"
    folder.mkdir(parents=True)
    (folder / "00000001.jsonl").write_text("")
    data = {**done.data, "status": "in_progress", "input_file_id": "file-gone"}
    server.objects.create("batch", "ann", "batch_orphan", data, due_at=time.time())
    batch = ended(client, "batch_orphan")
    assert (batch.status, batch.errors.data[0].code) == ("failed", "input_file_gone")
    until(lambda: not folder.exists())


def test_list_and_tenants(client: OpenAI, server: Server) -> None:
    bob = server.client("bob")
    mine = [ended(bob, begin(bob, [chat("a")]).id).id for _ in range(3)]
    assert [batch.id for batch in bob.batches.list(limit=2)] == mine[::-1]
    with pytest.raises(NotFoundError):
        client.batches.retrieve(mine[0])
    assert mine[0] not in [batch.id for batch in client.batches.list()]


def test_the_end_is_announced(client: OpenAI) -> None:
    with listening() as target:
        endpoint = client.webhooks.create(name="b", url=target.url, event_types=["batch.completed", "batch.failed"])
        good, bad = begin(client, [chat("a")]), begin(client, ["nonsense"])
        until(lambda: len(target.got) == 2)
        told = {(event["type"], event["data"]["id"]) for event in target.events()}
        assert told == {("batch.completed", good.id), ("batch.failed", bad.id)}
        client.webhooks.delete(endpoint.id)


def test_rows_survive_a_torn_line_and_a_second_writer(tmp_path: Path) -> None:
    def row(name: str, status: int = 200) -> dict[str, Any]:
        usage = {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}}
        return {"custom_id": name, "response": {"status_code": status, "body": {"usage": usage}}, "error": None}

    first = RowStore(tmp_path, 1)
    first.append(row("a"))
    second = RowStore(tmp_path, 3)
    assert second.done == {"a"}
    first.append(row("b", 404))  # it doesn't know yet that it lost its lease
    second.append(row("b"))
    first.close()
    with (tmp_path / "00000001.jsonl").open("ab") as file:
        file.write(b'{"custom_id": "c", "resp')
    second.close()
    third = RowStore(tmp_path, 5)
    assert [(row["custom_id"], row["response"]["status_code"]) for row in third.rows()] == [("a", 200), ("b", 404)]
    assert (third.completed, third.failed) == (1, 1)
    assert third.usage()["total_tokens"] == 5
    third.remove()
    assert not tmp_path.exists()


def test_a_batch_survives_kill_9(tmp_path: Path) -> None:
    """The server dies in the middle of a batch: the next one goes on, and no line is asked twice."""
    with process(tmp_path, "hold-answers") as (server, url):
        with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            short = [chat(f"short-{n}", max_tokens=2) for n in range(4)]  # these end before the gate
            batch = begin(client, [*short, *(chat(f"long-{n}") for n in range(16))])
            until(lambda: client.batches.retrieve(batch.id).request_counts.completed == 4)
        kill(server)
    with serving(tmp_path) as again:
        stored = again.objects.get("batch", "local", batch.id)
        again.objects.replace(stored, stored.data, due_at=time.time())  # as when its lease has run out
        client = again.client()
        batch = ended(client, batch.id)
        assert batch.request_counts.to_dict() == {"total": 20, "completed": 20, "failed": 0}
        assert len(rows(client, batch.output_file_id)) == 20
        jobs = [again.queue.get(f"answer-{batch.id}-{number}") for number in range(1, 21)]
        assert all(job.state in FINAL_STATES for job in jobs)
        assert [job.attempts for job in jobs[:4]] == [1] * 4
