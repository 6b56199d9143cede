"""What a key may ask for: requests, tokens, answers at once, stored bytes; shared by API processes."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import APIStatusError, RateLimitError

from service.auth import Key, KeyRing, Limits, Principal
from service.database import Database
from service.errors import RateLimited
from service.limits.gate import SLOT_S, Gate
from service.limits.sqlite import SqliteLimits
from tests.contracts.objects_contract import Clock
from tests.service.bench import until
from tests.service.http_fakes import Server, serving

KEYS = {
    "slow": Limits(requests_per_minute=3),
    "frugal": Limits(tokens_per_minute=400),
    "single": Limits(concurrent_answers=1),
    "small": Limits(stored_bytes=1000),
    "free": Limits(),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    keys = [
        Key(sha256=hashlib.sha256(name.encode()).hexdigest(), tenant=name, limits=limits)
        for name, limits in KEYS.items()
    ]
    with serving(tmp_path_factory.mktemp("limits"), keys=KeyRing(keys)) as server:
        yield server


def call(server: Server, key: str, path: str, **options: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}", **options.pop("headers", {})}
    return server.http.request("POST" if "json" in options else "GET", path, headers=headers, **options)


def ask(server: Server, key: str, *, max_tokens: int = 100, path: str = "/v1/chat/completions") -> httpx.Response:
    if path == "/v1/responses":
        body: dict[str, Any] = {"model": "default", "input": "Q", "max_output_tokens": max_tokens}
    else:
        messages = [{"role": "user", "content": "Q"}]
        body = {"model": "default", "messages": messages, "max_tokens": max_tokens}
    return call(server, key, path, json=body)


def test_requests_a_minute(server: Server) -> None:
    answers = [call(server, "slow", "/v1/models") for _ in range(4)]
    assert [answer.status_code for answer in answers] == [200, 200, 200, 429]
    assert [answer.headers["x-ratelimit-remaining-requests"] for answer in answers] == ["2", "1", "0", "0"]
    assert {answer.headers["x-ratelimit-limit-requests"] for answer in answers} == {"3"}
    refused = answers[-1]
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert 1 <= int(refused.headers["retry-after"]) <= 20
    assert "x-should-retry" not in refused.headers, "the client may try again"
    with pytest.raises(RateLimitError):
        server.client("slow").models.list()


def test_tokens_a_minute(server: Server) -> None:
    """A question counts with its own tokens and those that its answer may have."""
    first = ask(server, "frugal")
    assert first.status_code == 200
    assert first.headers["x-ratelimit-limit-tokens"] == "400"
    taken = 400 - int(first.headers["x-ratelimit-remaining-tokens"])
    question = first.json()["usage"]["prompt_tokens"]
    assert question + 100 <= taken + 1 <= question + 102
    assert ask(server, "frugal", path="/v1/responses").status_code == 200
    refused = ask(server, "frugal", max_tokens=250)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert "250" in refused.json()["error"]["message"] or "tokens" in refused.json()["error"]["message"]
    assert int(refused.headers["retry-after"]) >= 1
    assert call(server, "frugal", "/v1/models").status_code == 200, "what asks for no tokens goes on"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_answers_at_once(server: Server, path: str) -> None:
    server.worker.answer_gate.clear()
    body: dict[str, Any] = {"model": "default", "stream": True}
    body |= {"input": "Q"} if path.endswith("responses") else {"messages": [{"role": "user", "content": "Q"}]}
    with server.http.stream("POST", path, json=body, headers={"authorization": "Bearer single"}) as stream:
        lines = stream.iter_lines()  # let go of, it would close the stream
        assert any("Answer" in line for line in lines)
        refused = ask(server, "single")
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert call(server, "single", "/v1/models").status_code == 200
        server.worker.answer_gate.set()
    until(lambda: ask(server, "single").status_code == 200)


def test_stored_bytes(server: Server) -> None:
    client = server.client("small")
    first = client.files.create(file=("a", b"x" * 700), purpose="user_data")
    for size_bytes in (400, 100_000):
        with pytest.raises(APIStatusError) as error:
            client.files.create(file=("b", b"x" * size_bytes), purpose="user_data")
        assert (error.value.status_code, error.value.code) == (429, "insufficient_quota")
        assert error.value.response.headers["x-should-retry"] == "false"
    assert not list((server.data_dir / "uploads" / ".incoming").iterdir())
    server.client("free").files.create(file=("b", b"x" * 5000), purpose="user_data")
    client.files.delete(first.id)
    client.files.create(file=("b", b"x" * 400), purpose="user_data")


def test_keys_without_limits_are_not_counted(server: Server) -> None:
    answer = call(server, "free", "/v1/models")
    assert not [name for name in answer.headers if name.startswith("x-ratelimit")]
    with server.database.read() as connection:
        names = [row["name"] for row in connection.execute("SELECT name FROM buckets UNION SELECT name FROM slots")]
    assert not [name for name in names if name.startswith(hashlib.sha256(b"free").hexdigest())]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def gates(tmp_path: Path, clock: Clock) -> Iterator[tuple[Gate, Gate]]:
    """As of two API processes on one store."""
    databases = [Database(tmp_path / "foreword.sqlite") for _ in range(2)]
    one, two = (Gate(SqliteLimits(database, clock=clock)) for database in databases)
    yield one, two
    for database in databases:
        database.close()


def test_two_processes_count_together(gates: tuple[Gate, Gate]) -> None:
    principal = Principal("t", Limits(requests_per_minute=4, concurrent_requests=3), "k")
    for number in range(4):
        headers, slot = gates[number % 2].enter(principal)
        assert headers["x-ratelimit-remaining-requests"] == str(3 - number)
        gates[number % 2].free(principal, "requests", slot)
    with pytest.raises(RateLimited, match="4 requests a minute"):
        gates[0].enter(principal)


def test_a_refused_request_holds_no_slot(gates: tuple[Gate, Gate], clock: Clock) -> None:
    principal = Principal("t", Limits(requests_per_minute=2, concurrent_requests=2), "k")
    _, first = gates[0].enter(principal)
    gates[1].enter(principal)
    for _ in range(3):
        with pytest.raises(RateLimited, match="2 requests of this key are running"):
            gates[1].enter(principal)
    gates[0].free(principal, "requests", first)
    for _ in range(3):
        with pytest.raises(RateLimited, match="a minute"):
            gates[0].enter(principal)
    clock.now += 30
    gates[0].enter(principal)


def test_slots_of_a_dead_process_come_back(gates: tuple[Gate, Gate], clock: Clock) -> None:
    principal = Principal("t", Limits(concurrent_requests=2), "k")
    gates[0].enter(principal)
    _, alive = gates[1].enter(principal)
    clock.now += SLOT_S - 1
    gates[1].renew()
    clock.now += 2
    gates[1].enter(principal)  # the first one's process is silent
    gates[1].free(principal, "requests", alive)
    gates[1].renew()
    gates[0].enter(principal)


def test_an_amount_above_the_limit_waits_for_a_full_bucket(gates: tuple[Gate, Gate], clock: Clock) -> None:
    principal = Principal("t", Limits(tokens_per_minute=100), "k")
    gates[0].take_tokens(principal, 5000)
    with pytest.raises(RateLimited, match="5000 are asked for") as error:
        gates[0].take_tokens(principal, 5000)
    assert error.value.headers["retry-after"] == "60"
    clock.now += 60
    gates[0].take_tokens(principal, 5000)
