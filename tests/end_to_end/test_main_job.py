"""The main job as a user does it: the official client, the real server, the real model."""

import base64

import httpx
import pytest
from openai import APIStatusError, OpenAI

from tests.end_to_end.server import Server
from tests.end_to_end.text import library_text, question, with_needles

Document = tuple[str, dict[str, str]]


def file_part(file_id: str) -> dict:
    return {"type": "file", "file": {"file_id": file_id}}


def text_part(text: str) -> dict:
    return {"type": "text", "text": text}


def upload(client: OpenAI, name: str, text: str, **extra: str) -> str:
    uploaded = client.files.create(file=(name, text.encode()), purpose="user_data", extra_body=extra or None)
    processed = client.files.wait_for_processing(uploaded.id, poll_interval=0.2)
    assert processed.status == "processed"
    return uploaded.id


def stream(client: OpenAI, content: list[dict], **options: object) -> tuple[str, object]:
    text, usage = "", None
    for chunk in client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": content}],
        stream=True,
        stream_options={"include_usage": True},
        temperature=0,
        max_tokens=24,
        **options,
    ):
        if chunk.choices:
            text += chunk.choices[0].delta.content or ""
        usage = chunk.usage or usage
    return text, usage


def test_needle_of_a_30k_token_document_cold_then_warm(server: Server) -> None:
    client = server.client()
    text, needles = with_needles(library_text(105_000, skip=3))
    prefills = server.metric("foreword_stage_seconds_count", stage="prefill")

    file_id = upload(client, "library.py", text)
    document = server.document(file_id)
    assert 25_000 < document["num_tokens"] < 36_000
    assert 0 < document["density"] < 1
    assert document["recall"]["mean"] >= 0.9
    assert server.metric("foreword_time_to_first_token_seconds_count", cache_state="cold") >= 1

    for key, number in needles.items():
        answer, usage = stream(client, [file_part(file_id), text_part(question(key))])
        assert number in answer
        assert usage.prompt_tokens > document["num_tokens"]
        assert usage.prompt_tokens_details.cached_tokens >= document["num_tokens"]
    assert server.metric("foreword_stage_seconds_count", stage="prefill") == prefills + 1
    warm = sum(
        server.metric("foreword_time_to_first_token_seconds_count", cache_state=state)
        for state in ("warm_disk", "warm_host")
    )
    assert warm >= len(needles)


def test_system_text_and_file_position_do_not_change_the_prefix(server: Server, short_document: Document) -> None:
    client = server.client()
    text, needles = short_document
    file_id = upload(client, "short.py", text)
    prefills = server.metric("foreword_stage_seconds_count", stage="prefill")
    key, number = next(iter(needles.items()))
    answer, usage = stream(client, [text_part(question(key)), file_part(file_id)])
    assert number in answer
    assert usage.prompt_tokens_details.cached_tokens > 4096
    model = client.models.list().data[0].id
    spoken = client.chat.completions.create(
        model=model,
        messages=[
            {"role": "system", "content": "Answer with the number only."},
            {"role": "user", "content": [file_part(file_id), text_part(question(key))]},
            {"role": "assistant", "content": answer},
            {"role": "user", "content": question(key)},
        ],
        temperature=0,
        max_tokens=24,
    )
    assert number in (spoken.choices[0].message.content or "")
    assert spoken.usage is not None
    assert spoken.usage.prompt_tokens_details.cached_tokens > 4096
    assert server.metric("foreword_stage_seconds_count", stage="prefill") == prefills


def test_identical_upload_is_prefilled_once(server: Server, short_document: Document) -> None:
    client = server.client()
    first = upload(client, "same.py", short_document[0])
    prefills = server.metric("foreword_stage_seconds_count", stage="prefill")
    second = upload(client, "same.py", short_document[0])
    assert first != second
    assert server.metric("foreword_stage_seconds_count", stage="prefill") == prefills
    client.files.delete(first)
    key, number = next(iter(short_document[1].items()))
    answer, _ = stream(client, [file_part(second), text_part(question(key))])
    assert number in answer
    with pytest.raises(APIStatusError) as deleted:
        stream(client, [file_part(first), text_part(question(key))])
    assert deleted.value.status_code == 404


def test_two_files_in_one_chat(server: Server) -> None:
    client = server.client()
    first, _ = with_needles(library_text(20_000, skip=20), 1, seed=1)  # more than a segment
    second, in_second = with_needles(library_text(9_000, skip=30), 2, seed=2)
    ids = [upload(client, "first.py", first), upload(client, "second.py", second)]
    key = list(in_second)[1]
    answer, usage = stream(client, [*map(file_part, ids), text_part(question(key))])
    assert in_second[key] in answer
    assert 0 < usage.prompt_tokens_details.cached_tokens < usage.prompt_tokens
    assert server.metric("foreword_time_to_first_token_seconds_count", cache_state="partial") >= 1


def test_inline_file_waits_for_its_own_prefill(server: Server) -> None:
    text, needles = with_needles(library_text(6_000, skip=40), 1, seed=3)
    data = base64.b64encode(text.encode()).decode()
    part = {"type": "file", "file": {"filename": "inline.txt", "file_data": f"data:text/plain;base64,{data}"}}
    key, number = next(iter(needles.items()))
    answer, _ = stream(server.client(), [part, text_part(question(key))])
    assert number in answer


def test_question_during_the_prefill_gets_comments_then_the_answer(server: Server) -> None:
    client = server.client()
    text, needles = with_needles(library_text(18_000, skip=50), 1, seed=4)
    file_id = client.files.create(file=("waiting.py", text.encode()), purpose="user_data").id
    key, number = next(iter(needles.items()))
    body = {
        "model": client.models.list().data[0].id,
        "messages": [{"role": "user", "content": [file_part(file_id), text_part(question(key))]}],
        "stream": True,
        "temperature": 0,
        "max_tokens": 24,
    }
    comments, data = [], ""
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=300) as response:
        for line in response.iter_lines():
            if line.startswith(":"):
                comments.append(line)
            data += line
    assert any("prefill" in comment and "%" in comment for comment in comments)
    answer = "".join(data.split("data: "))
    assert "[DONE]" in answer
    again, _ = stream(client, [file_part(file_id), text_part(question(key))])
    assert number in again


def test_chat_without_a_document(server: Server) -> None:
    client = server.client()
    answer = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        temperature=0,
        max_tokens=20,
    )
    assert "Paris" in (answer.choices[0].message.content or "")
