"""/v1/responses with the official client: whole, streamed, in the background, gone on with, ended, forgotten."""

import base64
import hashlib
import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import APIError, BadRequestError, NotFoundError, OpenAI, UnprocessableEntityError

from service.auth import Key, KeyRing, Limits
from service.queue.base import SCRUBBED
from tests.service.bench import until
from tests.service.http_fakes import Server, serving
from tests.service.test_http_durability import kill, process

ANSWER = "Answer about 1 documents"
TEXT_EVENTS = [
    "response.output_item.added",
    "response.content_part.added",
    *["response.output_text.delta"] * 4,
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    keys = KeyRing(
        [
            Key(sha256=hashlib.sha256(name.encode()).hexdigest(), tenant=name, limits=limits)
            for name, limits in (("ann", Limits()), ("bob", Limits()), ("one", Limits(concurrent_answers=1)))
        ]
    )
    with serving(tmp_path_factory.mktemp("responses"), keys=keys) as server:
        yield server


@pytest.fixture(autouse=True)
def _open_gates(server: Server) -> Iterator[None]:
    yield
    server.worker.prefill_gate.set()
    server.worker.answer_gate.set()
    server.worker.words, server.worker.answer_error = [], None


@pytest.fixture
def client(server: Server) -> OpenAI:
    return server.client("ann")


def upload(client: OpenAI, text: str, *, wait: bool = True) -> str:
    file = client.files.create(file=("doc.txt", text.encode()), purpose="user_data")
    if wait:
        client.files.wait_for_processing(file.id, poll_interval=0.02)
    return file.id


def about(*file_ids: str, text: str = "Which number?") -> list[dict[str, Any]]:
    files = [{"type": "input_file", "file_id": file_id} for file_id in file_ids]
    return [{"role": "user", "content": [*files, {"type": "input_text", "text": text}]}]


def ended(client: OpenAI, response_id: str) -> Any:
    until(lambda: client.responses.retrieve(response_id).status not in ("queued", "in_progress"))
    return client.responses.retrieve(response_id)


def asked(server: Server) -> str:
    """The last question, as the worker got it."""
    return server.model.prompts.tokenizer.decode(server.worker.answered[-1]["question"])


def test_whole_response(client: OpenAI, server: Server) -> None:
    file_id = upload(client, "The number is 4711.")
    response = client.responses.create(
        model="default", input=about(file_id), instructions="Be brief.", metadata={"case": "1"}, temperature=0.5
    )
    assert (response.object, response.status, response.output_text) == ("response", "completed", ANSWER)
    assert (response.instructions, response.metadata, response.temperature) == ("Be brief.", {"case": "1"}, 0.5)
    assert response.completed_at is not None
    (message,) = response.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "completed")
    usage = response.usage
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert 0 < usage.input_tokens_details.cached_tokens < usage.input_tokens
    assert usage.input_tokens_details.cache_write_tokens == 0
    assert response.foreword["cache_state"] == "warm_disk"
    assert "Be brief." in asked(server)
    assert client.responses.retrieve(response.id) == response
    items = client.responses.input_items.list(response.id, order="asc").data
    assert [part.type for part in items[0].content] == ["input_file", "input_text"]


def test_plain_text_and_inline_file(client: OpenAI, server: Server) -> None:
    assert client.responses.create(model="default", input="Hello?").output_text == "Answer about 0 documents"
    data = base64.b64encode(b"inline text").decode()
    content = [{"type": "input_file", "file_data": data, "filename": "note.txt"}, {"type": "input_text", "text": "Q"}]
    response = client.responses.create(model="default", input=[{"role": "user", "content": content}])
    assert response.output_text == ANSWER
    kept = server.objects.get("response", "ann", response.id).data
    assert data not in repr(kept), "the bytes are a file's, not the record's"


def test_streamed_response(client: OpenAI) -> None:
    file_id = upload(client, "stream me")
    events = list(client.responses.create(model="default", input=about(file_id), stream=True))
    assert [event.type for event in events] == [
        "response.created", "response.in_progress", *TEXT_EVENTS, "response.completed"
    ]  # fmt: skip
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == ANSWER
    assert events[-1].response == client.responses.retrieve(events[-1].response.id)
    assert events[0].response.status == "in_progress"


def test_the_clients_stream_helper(client: OpenAI) -> None:
    file_id = upload(client, "helper")
    with client.responses.stream(model="default", input=about(file_id)) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert final.output_text == text == ANSWER
    assert final.usage.output_tokens == 4


def test_quotes_are_cited(client: OpenAI, server: Server) -> None:
    file_id = upload(client, "Article 1\nThe tenant shall pay the rent monthly.\n")
    server.worker.words = ['It says "The tenant ', 'shall pay the rent monthly."']
    events = list(client.responses.create(model="default", input=about(file_id), stream=True))
    (added,) = [event for event in events if event.type == "response.output_text.annotation.added"]
    (annotation,) = events[-1].response.output[0].content[0].annotations
    assert added.annotation.model_dump() == annotation.model_dump()
    assert (annotation.type, annotation.file_id, annotation.filename) == ("file_citation", file_id, "doc.txt")
    assert events[-1].response.output_text[annotation.start_index : annotation.index] == annotation.quote


def test_max_output_tokens_leaves_it_incomplete(client: OpenAI) -> None:
    response = client.responses.create(model="default", input="Q", max_output_tokens=2)
    assert (response.status, response.output_text) == ("incomplete", "Answer about")
    assert response.incomplete_details.reason == "max_output_tokens"
    *_, last = client.responses.create(model="default", input="Q", max_output_tokens=2, stream=True)
    assert (last.type, last.response.status) == ("response.incomplete", "incomplete")


def test_conversation_goes_on(client: OpenAI, server: Server) -> None:
    file_id = upload(client, "turns")
    first = client.responses.create(model="default", input=about(file_id, text="First?"), instructions="Old rule.")
    second = client.responses.create(model="default", input="Second?", previous_response_id=first.id)
    third = client.responses.create(
        model="default", input="Third?", previous_response_id=second.id, instructions="New rule."
    )
    assert (second.output_text, third.previous_response_id) == (ANSWER, second.id)
    question = asked(server)
    for said in ("First?", "Second?", "Third?", "New rule."):
        assert said in question
    assert question.count(ANSWER) == 2
    assert "Old rule." not in question
    for other, previous in ((server.client("bob"), first.id), (client, "resp_none")):
        with pytest.raises(BadRequestError) as error:
            other.responses.create(model="default", input="Mine?", previous_response_id=previous)
        assert error.value.code == "previous_response_not_found"


def test_messages_sent_back_by_hand(client: OpenAI, server: Server) -> None:
    first = client.responses.create(model="default", input="One?")
    history = [{"role": "user", "content": "One?"}, *[item.model_dump() for item in first.output]]
    client.responses.create(model="default", input=[*history, {"role": "user", "content": "Two?"}])
    assert "Answer about 0 documents" in asked(server)


def test_background_response(client: OpenAI, server: Server) -> None:
    """Made while nobody waits, and its stream is read twice: from the beginning, and from the middle."""
    server.worker.answer_gate.clear()
    file_id = upload(client, "background")
    response = client.responses.create(model="default", input=about(file_id), background=True)
    assert (response.background, response.output) == (True, [])
    assert response.status in ("queued", "in_progress")
    stream = client.responses.retrieve(response.id, stream=True)
    begun = [next(stream) for _ in range(6)]
    assert begun[-1].type == "response.output_text.delta"
    stream.close()
    assert client.responses.retrieve(response.id).status == "in_progress", "a reader that leaves ends nothing"
    server.worker.answer_gate.set()
    assert ended(client, response.id).output_text == ANSWER
    events = list(client.responses.retrieve(response.id, stream=True))
    assert [event.type for event in events] == [
        "response.created", "response.queued", "response.in_progress", *TEXT_EVENTS, "response.completed"
    ]  # fmt: skip
    rest = list(client.responses.retrieve(response.id, stream=True, starting_after=begun[-1].sequence_number))
    assert [*begun, *rest] == events
    with client.responses.stream(response_id=response.id, starting_after=2) as helper:
        assert next(iter(helper)).sequence_number == 3


def test_background_waits_for_its_documents(client: OpenAI, server: Server) -> None:
    server.worker.prefill_gate.clear()
    file_id = upload(client, "not ready", wait=False)
    response = client.responses.create(model="default", input=about(file_id), background=True)
    assert response.status == "queued"
    with server.http.stream(
        "GET", f"/v1/responses/{response.id}?stream=true", headers={"authorization": "Bearer ann"}
    ) as stream:
        lines = stream.iter_lines()
        assert any(line.startswith(": prefill") for line in lines)
        server.worker.prefill_gate.set()
        assert any("response.completed" in line for line in lines)
    assert ended(client, response.id).output_text == ANSWER


def test_foreground_waits_for_its_documents(client: OpenAI, server: Server) -> None:
    server.worker.prefill_gate.clear()
    file_id = upload(client, "soon ready", wait=False)
    threading.Timer(0.3, server.worker.prefill_gate.set).start()
    assert client.responses.create(model="default", input=about(file_id)).output_text == ANSWER


@pytest.mark.parametrize("stage", ["waiting", "answering"])
def test_cancel(client: OpenAI, server: Server, stage: str) -> None:
    if stage == "waiting":
        server.worker.prefill_gate.clear()
    else:
        server.worker.answer_gate.clear()
    file_id = upload(client, f"cancel while {stage}", wait=stage != "waiting")
    response = client.responses.create(model="default", input=about(file_id), background=True)
    stream = client.responses.retrieve(response.id, stream=True)
    events = [next(stream)]
    while stage == "answering" and events[-1].type != "response.output_text.delta":
        events.append(next(stream))
    assert client.responses.cancel(response.id).status == "cancelled"
    assert client.responses.cancel(response.id).status == "cancelled"
    events.extend(stream)
    assert (events[-1].type, events[-1].response.status) == ("response.incomplete", "cancelled")
    assert list(client.responses.retrieve(response.id, stream=True)) == events, "whoever reads again gets the same"
    rest = client.responses.retrieve(response.id, stream=True, starting_after=events[-2].sequence_number)
    assert list(rest) == events[-1:]
    job_id = server.objects.get("response", "ann", response.id).data["job_id"]
    if stage == "answering":
        assert server.queue.get(job_id).state == "cancelled"
        server.worker.answer_gate.set()
    assert ended(client, response.id).output == []
    finished = client.responses.create(model="default", input="Q")
    assert client.responses.cancel(finished.id).status == "completed"


def test_a_stream_waits_for_a_job_that_is_about_to_be_put(client: OpenAI, server: Server) -> None:
    """As when a process dies between the record and the job, or a reader comes in between."""
    before = client.responses.create(model="default", input="Q", background=True)
    ended(client, before.id)
    kept = server.objects.get("response", "ann", before.id)
    name = f"{before.id[:-4]}beef"
    data = {**kept.data, "job_id": f"answer-{name}"}
    server.objects.create("response", "ann", name, data, due_at=time.time() + 0.3)
    assert [event.type for event in client.responses.retrieve(name, stream=True)][-1] == "response.completed"


def test_a_client_that_leaves_ends_a_foreground_response(client: OpenAI, server: Server) -> None:
    server.worker.answer_gate.clear()
    stream = client.responses.create(model="default", input="Q", stream=True)
    for event in stream:
        if event.type == "response.output_text.delta":
            break
    stream.close()
    response_id = server.objects.find("response", "ann", limit=1)[0].id
    assert ended(client, response_id).status == "cancelled"


def test_deleted_response_is_forgotten(client: OpenAI, server: Server) -> None:
    response = client.responses.create(model="default", input="Q")
    job_id = server.objects.get("response", "ann", response.id).data["job_id"]
    client.responses.delete(response.id)
    for again in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(NotFoundError) as error:
            again(response.id)
        assert error.value.code == "response_not_found"
    assert server.queue.get(job_id).result == SCRUBBED


def test_not_stored_means_not_stored(client: OpenAI, server: Server) -> None:
    before = {stored.id for stored in server.objects.find("response", "ann", limit=100)}
    response = client.responses.create(model="default", input="Q", store=False)
    assert (response.output_text, response.store) == ("Answer about 0 documents", False)
    with pytest.raises(NotFoundError):
        client.responses.retrieve(response.id)
    assert {stored.id for stored in server.objects.find("response", "ann", limit=100)} == before
    job = server.queue.get(f"answer-{response.id.removeprefix('resp_')}")
    assert job.payload == job.result == SCRUBBED
    with pytest.raises(BadRequestError, match="stored"):
        client.responses.create(model="default", input="Q", store=False, background=True)


def test_deleted_document_takes_its_answers_along(client: OpenAI, server: Server) -> None:
    file_id = upload(client, "to be deleted")
    response = client.responses.create(model="default", input=about(file_id))
    job_id = server.objects.get("response", "ann", response.id).data["job_id"]
    client.files.delete(file_id)
    with pytest.raises(NotFoundError) as error:
        client.responses.retrieve(response.id)
    assert error.value.code == "document_deleted"
    with pytest.raises(APIError):
        list(client.responses.retrieve(response.id, stream=True))
    assert "Answer" not in repr(server.queue.events(job_id)) + repr(server.queue.get(job_id))
    with pytest.raises(BadRequestError):
        client.responses.create(model="default", input="And?", previous_response_id=response.id)


def test_another_tenants_response_is_not_there(client: OpenAI, server: Server) -> None:
    response = client.responses.create(model="default", input="Q")
    bob = server.client("bob")
    for attempt in (bob.responses.retrieve, bob.responses.cancel, bob.responses.delete):
        with pytest.raises(NotFoundError):
            attempt(response.id)
    assert client.responses.retrieve(response.id).status == "completed"


def test_failures(client: OpenAI, server: Server) -> None:
    server.worker.hold_ingest = True
    bad = client.files.create(file=("bad", b"BAD"), purpose="user_data").id
    response = client.responses.create(model="default", input=about(bad), background=True)
    server.worker.hold_ingest = False
    until(lambda: client.files.retrieve(bad).status == "error")
    response = ended(client, response.id)
    assert (response.status, response.error.code) == ("failed", "document_corrupt")
    *_, last = client.responses.retrieve(response.id, stream=True)
    assert (last.type, last.response.error.code) == ("response.failed", "document_corrupt")
    with pytest.raises(UnprocessableEntityError):
        client.responses.create(model="default", input=about(bad))
    server.worker.answer_error = {"code": "engine_error", "message": "it broke"}
    response = client.responses.create(model="default", input="Q")
    assert (response.status, response.error.message, response.output) == ("failed", "it broke", [])


@pytest.mark.parametrize(
    ("options", "param", "code"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools", "unsupported_parameter"),
        ({"conversation": "conv_1"}, "conversation", "unsupported_parameter"),
        ({"nonsense": 1}, "nonsense", "unknown_parameter"),
        ({"max_tokens": 1}, "max_tokens", "unknown_parameter"),
        ({"input": []}, "input", "invalid_value"),
        ({"input": [{"type": "function_call_output"}]}, "input.0.type", "unsupported_parameter"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0.type",
         "unsupported_parameter"),
        ({"input": [{"role": "user", "content": [{"type": "input_file", "file_url": "x"}]}]}, "input.0.content.0",
         "unsupported_parameter"),
        ({"metadata": {"k": "v" * 600}}, "metadata.k", "invalid_value"),
        ({"model": "gpt-none"}, "model", "model_not_found"),
    ],
)  # fmt: skip
def test_refused_by_name(server: Server, options: dict[str, Any], param: str, code: str) -> None:
    body = {"model": "default", "input": "Q", **options}
    answer = server.http.post("/v1/responses", json=body, headers={"authorization": "Bearer ann"})
    error = answer.json()["error"]
    assert answer.status_code in (400, 404)
    assert (error["param"], error["code"]) == (param, code)


def test_what_is_kept_of_a_question_is_bounded(client: OpenAI, server: Server) -> None:
    """A document that is still read must not let through what could never be answered."""
    server.worker.prefill_gate.clear()
    file_id = upload(client, "takes its time", wait=False)
    with pytest.raises(BadRequestError) as error:
        client.responses.create(model="default", input=about(file_id, text="why " * 4096), background=True)
    assert error.value.code == "context_length_exceeded"
    body = {"model": "default", "input": "Q", "stream_options": {"x": "y" * (9 << 20)}}
    answer = server.http.post("/v1/responses", json=body, headers={"authorization": "Bearer ann"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")


def test_idempotency_key_gives_the_same_response(client: OpenAI, server: Server) -> None:
    before = len(server.worker.answered)
    headers = {"Idempotency-Key": "response-1"}
    first, again = (client.responses.create(model="default", input="Once?", extra_headers=headers) for _ in range(2))
    assert first == again
    assert len(server.worker.answered) == before + 1


def test_background_answers_count_until_they_end(server: Server) -> None:
    client = server.client("one")
    server.worker.answer_gate.clear()
    first = client.responses.create(model="default", input="Q", background=True)
    answer = server.http.post(
        "/v1/responses", json={"model": "default", "input": "Q"}, headers={"authorization": "Bearer one"}
    )
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert int(answer.headers["retry-after"]) >= 1
    server.worker.answer_gate.set()
    ended(client, first.id)
    until(lambda: _status(server) == 200)


def test_a_deleted_response_counts_no_more(server: Server) -> None:
    client = server.client("one")
    until(lambda: _status(server) == 200)
    server.worker.answer_gate.clear()
    client.responses.delete(client.responses.create(model="default", input="Q", background=True).id)
    again = client.responses.create(model="default", input="Q", background=True)
    assert again.status in ("queued", "in_progress")
    server.worker.answer_gate.set()
    ended(client, again.id)


def _status(server: Server) -> int:
    headers = {"authorization": "Bearer one"}
    return server.http.post("/v1/responses", json={"model": "default", "input": "Q"}, headers=headers).status_code


def test_background_response_survives_kill_9(tmp_path: Path) -> None:
    """The server dies while the response waits for its document; the next one asks, and answers."""
    with process(tmp_path, "hold-prefills") as (server, url):
        client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        file_id = upload(client, "long", wait=False)
        waiting = client.responses.create(model="default", input=about(file_id), background=True)
        foreground = threading.Thread(target=lambda: _ask_and_fail(url, file_id))
        foreground.start()
        until(lambda: len(_kept(tmp_path)) == 2)
        kill(server)
        foreground.join(30)
        client.close()
    with serving(tmp_path) as again:
        for stored in again.objects.find("response", "local", limit=9):  # as when their leases have run out
            again.objects.replace(stored, stored.data, due_at=time.time())
        client = again.client()
        assert ended(client, waiting.id).output_text == ANSWER
        (lost,) = {stored.id for stored in again.objects.find("response", "local", limit=9)} - {waiting.id}
        response = ended(client, lost)
        assert (response.status, response.error.code) == ("failed", "server_error")


def _ask_and_fail(url: str, file_id: str) -> None:
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client, pytest.raises(APIError):
        client.responses.create(model="default", input=about(file_id))


def _kept(folder: Path) -> list[Any]:
    with sqlite3.connect(folder / "data" / "foreword.sqlite3") as connection:
        return connection.execute("SELECT id FROM objects WHERE kind = 'response'").fetchall()
