"""/v1/chat/completions with the official client: answers, waiting, refusals, and clients that leave."""

import base64
import contextlib
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import APIError, APIStatusError, BadRequestError, NotFoundError, OpenAI, UnprocessableEntityError

from tests.service.http_fakes import Server, serving

ANSWER = "Answer about 1 documents"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("chat")) as server:
        yield server


@pytest.fixture(autouse=True)
def _open_gates(server: Server) -> Iterator[None]:
    yield
    server.worker.prefill_gate.set()
    server.worker.answer_gate.set()
    server.worker.words = []


@pytest.fixture
def client(server: Server) -> OpenAI:
    return server.client()


def upload(client: OpenAI, text: str, *, wait: bool = True, **options: Any) -> str:
    file = client.files.create(file=("doc.txt", text.encode()), purpose="user_data", **options)
    if wait:
        client.files.wait_for_processing(file.id, poll_interval=0.02)
    return file.id


def part(file_id: str) -> dict[str, Any]:
    return {"type": "file", "file": {"file_id": file_id}}


def ask(client: OpenAI, *content: Any, **options: Any) -> Any:
    messages = [{"role": "user", "content": list(content)}]
    return client.chat.completions.create(**{"model": "default", "messages": messages, **options})


def text(content: str) -> dict[str, str]:
    return {"type": "text", "text": content}


def read_and_leave(server: Server, body: dict[str, Any], *, after_s: float) -> None:
    """A client that reads what comes, and is gone when nothing has come for `after_s`."""
    with contextlib.suppress(httpx.ReadTimeout):
        with server.http.stream("POST", "/v1/chat/completions", json=body, timeout=after_s) as response:
            response.read()
        raise AssertionError("the answer came to its end")


def eventually(condition: Any, timeout_s: float = 30) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def test_whole_answer_with_usage_and_figures(client: OpenAI, server: Server) -> None:
    file_id = upload(client, "The number is 4711.")
    completion = ask(client, part(file_id), text("Which number?"))
    assert completion.object == "chat.completion"
    assert completion.model == client.models.list().data[0].id
    assert completion.choices[0].message.content == ANSWER
    assert completion.choices[0].message.role == "assistant"
    assert completion.choices[0].finish_reason == "stop"
    usage = completion.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert 0 < usage.prompt_tokens_details.cached_tokens < usage.prompt_tokens
    extras = completion.foreword
    assert extras["ttft_s"] > 0
    assert (extras["cache_state"], extras["density"], extras["recall"]["mean"]) == ("warm_disk", 0.4, 0.97)


def test_streamed_answer(client: OpenAI) -> None:
    file_id = upload(client, "stream me")
    chunks = list(ask(client, part(file_id), text("Q"), stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == ANSWER
    assert {c.id for c in chunks} == {chunks[0].id}
    *_, last, usage = chunks
    assert last.choices[0].finish_reason == "stop"
    assert last.foreword["cache_state"] == "warm_disk"
    assert usage.choices == []
    assert usage.usage.prompt_tokens_details.cached_tokens > 0
    assert all(c.usage is None for c in chunks[:-1])
    plain = list(ask(client, part(file_id), text("Q"), stream=True))
    assert plain[-1].choices[0].finish_reason == "stop"
    assert plain[-1].foreword["ttft_s"] > 0


def test_two_handles_of_one_document_are_read_once(client: OpenAI, server: Server) -> None:
    handles = [upload(client, "the same twice") for _ in range(2)]
    assert ask(client, *map(part, handles), text("Q")).choices[0].message.content == ANSWER
    assert len(server.worker.answered[-1]["documents"]) == 1


def test_quotes_are_cited(client: OpenAI, server: Server) -> None:
    first = upload(client, "Article 1\nThe tenant shall pay the rent monthly.\n")
    second = upload(client, "nothing to the point")
    server.worker.words = ['It says "The tenant ', 'shall pay the rent monthly."', ' and "the landlord sleeps".']
    completion = ask(client, part(second), part(first), text("Q"))
    *_, last = ask(client, part(second), part(first), text("Q"), stream=True)
    server.worker.words = []
    message = completion.choices[0].message
    (citation,) = (annotation.to_dict() for annotation in message.annotations)
    assert {name: citation[name] for name in ("type", "file_id", "filename", "page", "line", "token_start")} == {
        "type": "file_citation",
        "file_id": first,
        "filename": "doc.txt",
        "page": None,
        "line": 2,
        "token_start": 10,
    }
    assert message.content[citation["start_index"] : citation["end_index"]] == citation["quote"]
    assert last.choices[0].delta.annotations == [citation]


def test_answer_survives_a_document_that_cannot_be_searched(client: OpenAI, server: Server) -> None:
    file_id = upload(client, "a document that loses its manifest")
    document = server.documents.document(server.documents.file("local", file_id).document_id or "")
    (server.data_dir / document.folder / "manifest.json").unlink()
    assert ask(client, part(file_id), text("Q")).choices[0].message.annotations == []


def test_what_the_worker_is_given(client: OpenAI, server: Server) -> None:
    """The same tokens whichever comes first, question or file; documents by first mention; sampling as asked."""
    first, second = upload(client, "first document"), upload(client, "second document")
    options = {"temperature": 0.5, "top_p": 0.9, "seed": 7, "max_completion_tokens": 3, "stop": ["END", "."]}
    extra = {"repetition_penalty": 1.1, "top_k": 5}
    ask(client, part(first), text("Q"), part(second), **options, extra_body=extra)
    ask(client, text("Q"), part(first), part(second), part(first))
    one, two = server.worker.answered[-2:]
    assert one["question"] == two["question"]
    ids = [server.documents.file("local", file_id).document_id for file_id in (first, second)]
    assert one["documents"] == two["documents"] == ids
    assert one["sampling"] == {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "repetition_penalty": 1.1,
        "seed": 7,
        "max_tokens": 3,
        "stop": ["END", "."],
    }
    assert two["sampling"]["temperature"] == 0.0
    assert isinstance(two["sampling"]["seed"], int)  # so that another attempt says the same


def test_length_ends_an_answer(client: OpenAI) -> None:
    completion = ask(client, text("Q"), max_tokens=2)
    assert (completion.choices[0].message.content, completion.choices[0].finish_reason) == ("Answer about", "length")


def test_conversation_of_several_turns(client: OpenAI, server: Server) -> None:
    file_id = upload(client, "a document for a talk")
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi", "annotations": [], "refusal": None},
        {"role": "user", "content": [part(file_id), text("And?")]},
    ]
    completion = client.chat.completions.create(model="default", messages=messages)  # type: ignore[arg-type]
    assert completion.choices[0].message.content == ANSWER
    question = server.worker.answered[-1]["question"]
    assert server.model.prompts.tokenizer.decode(question, skip_control=False) == (
        "Be brief.\n\nHello<|im_end|>\n<|im_start|>assistant\nHi<|im_end|>\n"
        "<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("prefix", ["", "data:text/plain;base64,"])
def test_inline_file(client: OpenAI, server: Server, prefix: str) -> None:
    data = prefix + base64.b64encode(f"inline {prefix}".encode()).decode()
    inline = {"type": "file", "file": {"filename": "note.txt", "file_data": data}}
    assert ask(client, inline, text("Q")).choices[0].message.content == ANSWER
    newest = client.files.list(limit=1).data[0]
    assert newest.filename == "note.txt"
    assert newest.expires_at == pytest.approx(newest.created_at + 3600, abs=2)
    ask(client, inline, text("R"))
    assert client.files.list(limit=1).data[0].id == newest.id


@pytest.mark.parametrize("gone", ["deleted", "expired"])
def test_inline_file_comes_again_after_its_handle_has_gone(client: OpenAI, server: Server, gone: str) -> None:
    """The queue still knows the job of the first time."""
    data = base64.b64encode(f"inline {gone}".encode()).decode()
    inline = {"type": "file", "file": {"filename": "again.txt", "file_data": data}}
    assert ask(client, inline, text("Q")).choices[0].message.content == ANSWER
    first = client.files.list(limit=1).data[0]
    if gone == "deleted":
        client.files.delete(first.id)
    else:
        server.documents.update_file(first.id, {"expires_at": time.time() - 1})
    assert ask(client, inline, text("Q")).choices[0].message.content == ANSWER
    again = client.files.list(limit=1).data[0]
    assert (again.filename, client.files.content(again.id).read()) == ("again.txt", f"inline {gone}".encode())


def test_waiting_stream_gets_comments_then_the_answer(client: OpenAI, server: Server) -> None:
    server.worker.prefill_gate.clear()
    file_id = upload(client, "slow document", wait=False)
    body = {"model": "default", "stream": True, "messages": [{"role": "user", "content": [part(file_id), text("Q")]}]}
    lines: list[str] = []
    with server.http.stream("POST", "/v1/chat/completions", json=body, timeout=20) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        for line in response.iter_lines():
            lines.append(line)
            if line == ": prefill 33%":
                server.worker.prefill_gate.set()
    assert lines.index(": prefill 33%") < next(n for n, line in enumerate(lines) if line.startswith("data: {"))
    assert lines[-2] == "data: [DONE]"
    assert server.worker.answered[-1]["waited"] is True


def test_waiting_comments_keep_coming(client: OpenAI, server: Server) -> None:
    server.worker.prefill_gate.clear()
    file_id = upload(client, "very slow document", wait=False)
    body = {"model": "default", "stream": True, "messages": [{"role": "user", "content": [part(file_id), text("Q")]}]}
    with server.http.stream("POST", "/v1/chat/completions", json=body, timeout=4) as response:
        comments = (line for line in response.iter_lines() if line == ": prefill 33%")
        next(comments), next(comments)  # while there is news
        started = time.monotonic()
        next(comments)
        assert time.monotonic() - started < 3.5


def test_whole_answer_waits_too(client: OpenAI, server: Server) -> None:
    server.worker.prefill_gate.clear()
    file_id = upload(client, "another slow document", wait=False)
    threading.Timer(0.4, server.worker.prefill_gate.set).start()
    assert ask(client, part(file_id), text("Q")).choices[0].message.content == ANSWER


def test_only_the_first_documents_prefill_is_waited_for(client: OpenAI, server: Server) -> None:
    first = upload(client, "ready document")
    server.worker.prefill_gate.clear()
    second = upload(client, "unready document", wait=False)
    eventually(lambda: server.documents.file("local", second).document_id)
    assert ask(client, part(first), part(second), text("Q")).choices[0].message.content == "Answer about 2 documents"


@pytest.mark.parametrize("stream", [False, True])
def test_client_that_leaves_cancels_its_answer(client: OpenAI, server: Server, stream: bool) -> None:
    file_id = upload(client, "a document to leave")
    server.worker.answer_gate.clear()
    before, cancelled = len(server.worker.answered), len(server.worker.cancelled)
    body = {"model": "default", "stream": stream, "messages": [{"role": "user", "content": [part(file_id), text("Q")]}]}
    read_and_leave(server, body, after_s=0.5)
    assert len(server.worker.answered) == before + 1
    eventually(lambda: len(server.worker.cancelled) == cancelled + 1)
    assert server.queue.get(server.worker.cancelled[-1]).state == "cancelled"
    assert client.files.retrieve(file_id).status == "processed"


def test_a_slow_reader_holds_up_nobody_and_gets_it_all(client: OpenAI, server: Server) -> None:
    """A client that reads nothing for a while: more than sockets hold is said to it meanwhile."""
    server.worker.words = [f"{number:03}" + "x" * 100_000 for number in range(100)]
    server.worker.answer_gate.clear()
    body = {"model": "default", "stream": True, "messages": [{"role": "user", "content": "Q"}]}
    with server.http.stream("POST", "/v1/chat/completions", json=body) as response:
        eventually(lambda: server.queue.jobs("running", limit=2))
        (job,) = server.queue.jobs("running", limit=2)
        server.worker.answer_gate.set()
        eventually(lambda: server.queue.get(job.id).state == "succeeded")
        server.worker.words = []
        assert ask(client, text("Q")).choices[0].message.content == "Answer about 0 documents"
        said = [json.loads(line[6:])["choices"] for line in response.iter_lines() if line.startswith("data: {")]
    words = [choices[0]["delta"].get("content") or "" for choices in said if choices]
    assert [word[:3] for word in words if word] == [f"{number:03}" for number in range(100)]


@pytest.mark.parametrize("stream", [False, True])
def test_client_that_leaves_keeps_the_prefill(client: OpenAI, server: Server, stream: bool) -> None:
    server.worker.prefill_gate.clear()
    file_id = upload(client, f"a prefill to keep {stream}", wait=False)
    answered = len(server.worker.answered)
    body = {"model": "default", "stream": stream, "messages": [{"role": "user", "content": [part(file_id), text("Q")]}]}
    read_and_leave(server, body, after_s=0.6)
    server.worker.prefill_gate.set()
    assert client.files.wait_for_processing(file_id, poll_interval=0.02).status == "processed"
    assert len(server.worker.answered) == answered


def test_failed_file(client: OpenAI) -> None:
    file_id = upload(client, "BAD bytes")
    with pytest.raises(UnprocessableEntityError) as error:
        ask(client, part(file_id), text("Q"))
    assert (error.value.code, error.value.param) == ("document_corrupt", "messages")
    assert "it is damaged" in error.value.message


def test_file_that_another_models_tokenizer_read(client: OpenAI, server: Server) -> None:
    file_id = upload(client, "read by another model")
    document_id = server.documents.file("local", file_id).document_id
    with server.database.write(durable=False) as connection:
        connection.execute("UPDATE documents SET tokenizer_digest = 'other' WHERE id = ?", (document_id,))
    with pytest.raises(UnprocessableEntityError) as error:
        ask(client, part(file_id), text("Q"))
    assert error.value.code == "tokenizer_changed"


def test_file_deleted_while_the_stream_waits(client: OpenAI, server: Server) -> None:
    server.worker.prefill_gate.clear()
    file_id = upload(client, "a document to delete", wait=False)
    stream = ask(client, part(file_id), text("Q"), stream=True)
    client.files.delete(file_id)
    with pytest.raises(APIError) as error:
        list(stream)
    assert error.value.code == "file_not_found"


def test_unknown_and_deleted_files(client: OpenAI) -> None:
    file_id = upload(client, "short-lived")
    client.files.delete(file_id)
    for missing in (file_id, "file-doesnotexist"):
        with pytest.raises(NotFoundError) as error:
            ask(client, part(missing), text("Q"))
        assert error.value.code == "file_not_found"


def test_unknown_model(client: OpenAI) -> None:
    for stream in (False, True):
        with pytest.raises(NotFoundError) as error:
            ask(client, text("Q"), model="gpt-4", stream=stream)
        assert error.value.code == "model_not_found"


def test_context_length_names_both_numbers(tmp_path: Path) -> None:
    with serving(tmp_path, max_positions=300) as server:
        client = server.client()
        file_id = upload(client, "x" * 100)
        for options in ({"max_tokens": 200}, {"max_tokens": 200, "stream": True}):
            with pytest.raises(BadRequestError) as error:
                ask(client, part(file_id), text("Q"), **options)
            assert error.value.code == "context_length_exceeded"
            assert "300" in error.value.message
            assert str(ask(client, part(file_id), text("Q")).usage.prompt_tokens + 200) in error.value.message
        # Without a wish the answer takes what is left.
        assert server.worker.answered[-1]["sampling"]["max_tokens"] < 300 - 100


@pytest.mark.parametrize(
    ("options", "param", "code"),
    [
        ({"n": 2}, "n", "unsupported_parameter"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "unsupported_parameter"),
        ({"tool_choice": "required"}, "tool_choice", "unsupported_parameter"),
        ({"response_format": {"type": "json_object"}}, "response_format", "unsupported_parameter"),
        ({"logprobs": True}, "logprobs", "unsupported_parameter"),
        ({"presence_penalty": 1.0}, "presence_penalty", "unsupported_parameter"),
        ({"modalities": ["audio"]}, "modalities", "unsupported_parameter"),
        ({"reasoning_effort": "high"}, "reasoning_effort", "unsupported_parameter"),
        ({"extra_body": {"wings": 2}}, "wings", "unknown_parameter"),
        ({"temperature": 3}, "temperature", "invalid_value"),
        ({"top_p": 0}, "top_p", "invalid_value"),
        ({"max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop", "invalid_value"),
        ({"stop": ""}, "stop", "invalid_value"),
        ({"seed": "seven"}, "seed", "invalid_value"),
        ({"extra_body": {"fidelity": "best"}}, "fidelity", "invalid_value"),
        ({"messages": []}, "messages", "invalid_value"),
        ({"messages": [{"role": "user", "content": ""}]}, "messages", "invalid_value"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages.0.role", "invalid_value"),
        (
            {"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]},
            "messages.0.role",
            "unsupported_parameter",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages.0.content.0.type",
            "unsupported_parameter",
        ),
        (
            {"messages": [{"role": "system", "content": [{"type": "file", "file": {"file_id": "file-1"}}]}]},
            "messages.0.content.0",
            "invalid_value",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "file", "file": {"file_data": "%%", "filename": "a"}}]}
                ]
            },
            "messages",
            "invalid_value",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "file", "file": {"file_data": "QQ=="}}]}]},
            "messages",
            "missing_required_parameter",
        ),
    ],
)
def test_what_is_refused_is_named(client: OpenAI, options: dict[str, Any], param: str, code: str) -> None:
    messages = [{"role": "user", "content": "Q"}]
    with pytest.raises(BadRequestError) as error:
        client.chat.completions.create(**{"model": "default", "messages": messages, **options})
    assert (error.value.param, error.value.code) == (param, code)
    assert error.value.type == "invalid_request_error"


def test_options_that_ask_for_nothing_special_are_taken(client: OpenAI) -> None:
    completion = ask(
        client, text("Q"), n=1, tools=[], tool_choice="none", response_format={"type": "text"}, logprobs=False,
        presence_penalty=0, frequency_penalty=0.0, user="me", metadata={"a": "b"}, store=False, service_tier="auto",
        temperature=None, stop=None, stream=None,
    )  # fmt: skip
    assert completion.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    "body",
    [
        {"model": "default", "messages": [{"role": "user", "content": "\ud800"}]},
        {"model": "\udfff", "messages": [{"role": "user", "content": "Q"}]},
        {"model": "default", "messages": [{"role": "user", "content": [part("file-\ud800")]}]},
        {"model": "default", "messages": [{"role": "user", "content": "Q"}], "stop": "\ud800"},
    ],
)
def test_half_a_surrogate_pair_is_refused(server: Server, body: dict[str, Any]) -> None:
    headers = {"content-type": "application/json"}
    answer = server.http.post("/v1/chat/completions", content=json.dumps(body), headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")


@pytest.mark.parametrize(
    ("code", "status"),
    [("internal_error", 500), ("storage_full", 507), ("context_length_exceeded", 400), ("document_deleted", 404)],
)
def test_answer_that_fails(client: OpenAI, server: Server, code: str, status: int) -> None:
    server.worker.answer_error = {"code": code, "message": "it went wrong"}
    with pytest.raises(APIStatusError, match="it went wrong") as error:
        ask(client, text("Q"))
    with pytest.raises(APIError, match="it went wrong") as streamed:
        list(ask(client, text("Q"), stream=True))
    server.worker.answer_error = None
    assert (error.value.status_code, error.value.code, streamed.value.code) == (status, code, code)


def test_same_idempotency_key_is_answered_once(client: OpenAI, server: Server) -> None:
    before = len(server.worker.answered)
    options = {"extra_headers": {"Idempotency-Key": "answer-1"}}
    texts = [ask(client, text("Q"), **options).choices[0].message.content for _ in range(2)]
    assert texts == ["Answer about 0 documents"] * 2
    streams = {"stream": True, "extra_headers": {"Idempotency-Key": "answer-2"}}
    for _ in range(2):
        texts.append("".join(c.choices[0].delta.content or "" for c in ask(client, text("Q"), **streams)))
    assert texts == ["Answer about 0 documents"] * 4
    assert len(server.worker.answered) == before + 2
    with pytest.raises(UnprocessableEntityError) as error:
        ask(client, text("Another question"), **options)
    assert error.value.code == "idempotency_key_reused"


@pytest.mark.parametrize("steady", [True, False])
def test_answer_taken_over_by_another_worker(client: OpenAI, server: Server, steady: bool) -> None:
    """It goes on without repeating itself; should the second worker say something else, the stream ends as failed."""
    server.worker.answer_gate.clear()
    stream = ask(client, text("Q"), stream=True)
    got = [next(stream).choices[0].delta.content for _ in range(3)]
    assert got == ["", "Answer", " about"]
    job = next(job for job in _running(server) if job.kind == "answer")
    # As after the death of a worker: the lease ends, and another one begins again.
    server.worker.silent = True
    with server.database.write(durable=False) as connection:
        connection.execute("UPDATE jobs SET lease_until = 0 WHERE id = ?", (job.id,))
    server.worker.steady = steady
    assert server.queue.reclaim() == 1
    server.worker.silent = False
    server.worker.answer_gate.set()
    if steady:
        rest = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
        assert "".join(rest) == " 0 documents"
    else:
        with pytest.raises(APIError) as error:
            list(stream)
        assert error.value.code == "answer_failed"
    server.worker.steady = True


def _running(server: Server) -> list[Any]:
    with server.database.read() as connection:
        rows = connection.execute("SELECT id FROM jobs WHERE state = 'running'").fetchall()
    return [server.queue.get(row["id"]) for row in rows]
