"""Webhooks: endpoints through the official client, signed messages that it verifies, retries, and refused targets."""

import hashlib
import ipaddress
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from openai import APIError, BadRequestError, InvalidWebhookSignatureError, NotFoundError, OpenAI

from service import deliveries, webhook_sender
from service.addresses import AddressRefused, PublicNetwork, is_public
from service.auth import Key, KeyRing
from service.objects.base import StoredObject
from service.webhook_sender import Sender, Undelivered
from service.webhooks import announce
from tests.service.bench import until
from tests.service.http_fakes import Server, serving
from tests.service.test_http_durability import kill, process


class Target:
    """A server that takes webhooks, and answers as it is told."""

    def __init__(self) -> None:
        self.got: list[tuple[dict[str, str], bytes]] = []
        self.statuses: list[int] = []  # of the next answers; then 200
        self.hang = threading.Event()
        self.waiting = 0
        target = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                headers = {name.lower(): value for name, value in self.headers.items()}
                target.got.append((headers, body))
                if self.path == "/hang":
                    target.waiting += 1
                    target.hang.wait(60)
                    return
                self.send_response(target.statuses.pop(0) if target.statuses else 200)
                self.send_header("location", "http://127.0.0.1:1/elsewhere")
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *arguments: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(body) for _, body in self.got]

    def types(self) -> list[str]:
        return [event["type"] for event in self.events()]

    def close(self) -> None:
        self.hang.set()
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def listening() -> Iterator[Target]:
    target = Target()
    try:
        yield target
    finally:
        target.close()


@pytest.fixture
def target() -> Iterator[Target]:
    with listening() as target:
        yield target


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    keys = KeyRing([Key(sha256=hashlib.sha256(name.encode()).hexdigest(), tenant=name) for name in ("ann", "bob")])
    with serving(tmp_path_factory.mktemp("webhooks"), keys=keys, webhook_allow_private=True) as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[OpenAI]:
    client = server.client("ann")
    yield client
    for endpoint in client.webhooks.list():
        client.webhooks.delete(endpoint.id)
    until(lambda: server.objects.count_due("delivery") == 0)


@pytest.fixture
def quick(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Retries within a moment."""
    monkeypatch.setattr(deliveries, "DELAYS_S", (0.05, 0.05, 0.05))


def register(client: OpenAI, target: Target, *types: str, path: str = "/hook") -> Any:
    return client.webhooks.create(name="test", url=target.url + path, event_types=list(types))


def test_endpoints(client: OpenAI, server: Server, target: Target) -> None:
    made = register(client, target, "response.completed", "file.processed")
    assert made.signing_secret.startswith("whsec_")
    kept = client.webhooks.retrieve(made.id)
    assert (kept.id, kept.name, kept.url) == (made.id, "test", f"{target.url}/hook")
    assert made.signing_secret not in kept.model_dump_json()
    assert made.signing_secret.endswith(kept.signing_secret_hint[-4:])
    changed = client.webhooks.update(made.id, name="other", event_types=["batch.completed"])
    assert (changed.name, changed.event_types, changed.url) == ("other", ["batch.completed"], kept.url)
    more = register(client, target, "batch.failed")
    assert [endpoint.id for endpoint in client.webhooks.list(limit=1)] == [more.id, made.id]
    rotated = client.webhooks.rotate_secret(made.id)
    assert rotated.signing_secret != made.signing_secret
    assert "file.processed" in client.webhooks.event_types.list().data
    bob = server.client("bob")
    assert list(bob.webhooks.list()) == []
    for attempt in (bob.webhooks.retrieve, bob.webhooks.delete, bob.webhooks.rotate_secret):
        with pytest.raises(NotFoundError) as error:
            attempt(made.id)
        assert error.value.code == "webhook_endpoint_not_found"
    assert client.webhooks.delete(made.id).deleted
    with pytest.raises(NotFoundError):
        client.webhooks.retrieve(made.id)


def test_events_are_signed_as_the_client_expects(client: OpenAI, target: Target) -> None:
    endpoint = register(client, target, "response.completed")
    response = client.responses.create(model="default", input="Q", background=True)
    until(lambda: target.got)
    headers, body = target.got[0]
    event = client.webhooks.unwrap(body, headers, secret=endpoint.signing_secret)
    assert (event.type, event.data.id, event.object) == ("response.completed", response.id, "event")
    assert event.id == headers["webhook-id"]
    assert headers["content-type"] == "application/json"
    with pytest.raises(InvalidWebhookSignatureError):
        client.webhooks.unwrap(body.replace(b"completed", b"failed"), headers, secret=endpoint.signing_secret)


def test_both_secrets_are_good_for_a_day(client: OpenAI, target: Target) -> None:
    old = register(client, target, "batch.failed")
    new = client.webhooks.rotate_secret(old.id, keep_old_secret_active_for_24_hours=True)
    result = client.webhooks.test(old.id, event_type="batch.failed")
    assert (result.status_code, result.success, result.webhook_endpoint_id) == (200, True, old.id)
    headers, body = target.got[0]
    for secret in (old.signing_secret, new.signing_secret):
        client.webhooks.verify_signature(body, headers, secret=secret)
    client.webhooks.rotate_secret(old.id)
    client.webhooks.test(old.id, event_type="batch.failed")
    headers, body = target.got[1]
    with pytest.raises(InvalidWebhookSignatureError):
        client.webhooks.verify_signature(body, headers, secret=old.signing_secret)


def test_files_tell_what_became_of_them(client: OpenAI, server: Server, target: Target) -> None:
    register(client, target, "file.processed", "file.error")
    good = client.files.create(file=("a.txt", b"a good file"), purpose="user_data")
    bad = client.files.create(file=("b.txt", b"BAD file"), purpose="user_data")
    client.files.create(file=("c.jsonl", b"{}"), purpose="batch")
    until(lambda: len(target.got) == 2)
    assert {(event["type"], event["data"]["id"]) for event in target.events()} == {
        ("file.processed", good.id),
        ("file.error", bad.id),
    }
    until(lambda: server.objects.count_due("watch") == 0)
    assert len(target.got) == 2


def test_responses_tell_their_end(client: OpenAI, server: Server, target: Target) -> None:
    register(client, target, *(f"response.{end}" for end in ("completed", "failed", "incomplete", "cancelled")))
    client.responses.create(model="default", input="not in the background")
    client.responses.create(model="default", input="Q", background=True, max_output_tokens=1)
    until(lambda: target.types() == ["response.incomplete"])
    server.worker.answer_gate.clear()
    response = client.responses.create(model="default", input="Q", background=True)
    client.responses.cancel(response.id)
    server.worker.answer_gate.set()
    until(lambda: len(target.got) == 2)
    assert target.events()[1]["data"] == {"id": response.id}
    assert target.types()[1] == "response.cancelled"


@pytest.mark.usefixtures("quick")
def test_failed_deliveries_are_tried_again(client: OpenAI, server: Server, target: Target) -> None:
    """Redirects and errors are no success; each try says the same under the same id, signed anew."""
    endpoint = register(client, target, "batch.completed")
    target.statuses = [500, 302, 429]
    announce(server.objects, "ann", "batch.completed", "batch_1")
    announce(server.objects, "ann", "batch.completed", "batch_1")
    until(lambda: len(target.got) == 4)
    until(lambda: server.objects.count_due("delivery") == 0)
    assert len({body for _, body in target.got}) == 1
    assert len({headers["webhook-id"] for headers, _ in target.got}) == 1
    for headers, body in target.got:
        client.webhooks.verify_signature(body, headers, secret=endpoint.signing_secret)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(("statuses", "tries"), [([500] * 9, 4), ([410], 1)])
def test_deliveries_are_given_up(
    client: OpenAI, server: Server, target: Target, statuses: list[int], tries: int
) -> None:
    register(client, target, "batch.completed")
    target.statuses = statuses
    announce(server.objects, "ann", "batch.completed", f"batch_{tries}")
    until(lambda: len(target.got) == tries)
    until(lambda: server.objects.count_due("delivery") == 0)
    assert len(target.got) == tries


@pytest.mark.usefixtures("quick")
def test_a_hanging_target_holds_up_nobody(client: OpenAI, server: Server, target: Target) -> None:
    register(client, target, "batch.completed", path="/hang")
    for number in range(40):
        announce(server.objects, "ann", "batch.completed", f"hanging-{number}")
    until(lambda: target.waiting == deliveries.MOST_A_TARGET)
    with listening() as other:
        server.client("bob").webhooks.create(name="b", url=other.url, event_types=["batch.completed"])
        started = time.monotonic()
        announce(server.objects, "bob", "batch.completed", "quick")
        until(lambda: other.got)
        assert time.monotonic() - started < 8
        assert server.http.get("/livez").status_code == 200
        for endpoint in server.client("bob").webhooks.list():
            server.client("bob").webhooks.delete(endpoint.id)
    assert target.waiting == deliveries.MOST_A_TARGET
    target.hang.set()


async def test_a_target_that_says_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhook_sender, "TIMEOUT_S", 0.2)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        async with Sender(PublicNetwork(allow_private=True)) as sender:
            endpoint = at(f"http://127.0.0.1:{silent.getsockname()[1]}/")
            with pytest.raises(Undelivered, match="no answer within"):
                await sender.send(endpoint, "evt_1", "{}")


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1",
        "255.255.255.255", "168.63.129.16", "192.0.0.192", "::1", "::", "fe80::1", "fc00::1", "fd00:ec2::254",
        "ff02::1", "::ffff:127.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::", "2001:db8::1", "::127.0.0.1", "fec0::1",
        "64:ff9b:1::7f00:1", "::ffff:0:7f00:1",
    ],
)  # fmt: skip
async def test_addresses_that_are_refused(address: str) -> None:
    assert not is_public(ipaddress.ip_address(address))

    async def resolve(host: str, port: int) -> list[str]:
        return ["93.184.215.14", address]  # one bad one is enough

    network = PublicNetwork(resolve=resolve)
    with pytest.raises(AddressRefused) as refused:
        await network.connect_tcp("innocent.example", 443, timeout=1)
    assert address not in str(refused.value), "what a name means inside is not told"
    async with Sender(network) as sender:
        with pytest.raises(Undelivered, match="no public address"):
            await sender.send(at("https://innocent.example/"), "evt_1", "{}")


@pytest.mark.parametrize("address", ["93.184.215.14", "8.8.8.8", "2606:2800:21f:cb07:6820:80da:af6b:8b2c"])
def test_addresses_that_are_not(address: str) -> None:
    assert is_public(ipaddress.ip_address(address))


async def test_a_name_is_resolved_once_and_connected_to_as_that(target: Target) -> None:
    """A second look-up, which could say something else, is never made; the host's name goes on to the server."""
    asked = []

    async def resolve(host: str, port: int) -> list[str]:
        asked.append((host, port))
        return ["127.0.0.1"]

    port = target.url.rpartition(":")[2]
    async with Sender(PublicNetwork(allow_private=True, resolve=resolve)) as sender:
        assert await sender.send(at(f"http://hooks.example:{port}/x"), "evt_1", "{}") == 200
    assert asked == [("hooks.example", int(port))]
    assert target.got[0][0]["host"] == f"hooks.example:{port}"


def test_private_targets_need_the_setting(tmp_path: Path, target: Target) -> None:
    with serving(tmp_path) as server:
        client = server.client()
        for url in (f"{target.url}/", "https://127.0.0.1/", "https://[::1]:8443/", "https://169.254.169.254/latest"):
            with pytest.raises(BadRequestError) as error:
                client.webhooks.create(name="x", url=url, event_types=["batch.completed"])
            assert error.value.param == "url"
        endpoint = client.webhooks.create(name="x", url="https://localhost/", event_types=["batch.completed"])
        with pytest.raises(BadRequestError, match="no public address") as error:
            client.webhooks.test(endpoint.id, event_type="batch.completed")
        assert error.value.code == "webhook_unreachable"
        assert target.got == []


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"url": "ftp://x.example/"}, "url"),
        ({"url": "https://user:pass@x.example/"}, "url"),
        ({"url": "nonsense"}, "url"),
        ({"url": "https://x.example:99999/"}, "url"),
        ({"url": "https://x .example/"}, "url"),
        ({"url": "https://x.example/\r\nx: y"}, "url"),
        ({"event_types": []}, "event_types"),
        ({"event_types": ["video.completed"]}, "event_types.0"),
        ({"name": ""}, "name"),
    ],
)
def test_impossible_endpoints(client: OpenAI, options: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequestError) as error:
        client.webhooks.create(
            **{"name": "x", "url": "https://x.example/", "event_types": ["batch.completed"], **options}
        )
    assert error.value.param == param


def test_deliveries_survive_kill_9(tmp_path: Path, target: Target) -> None:
    with process(tmp_path, "private-webhooks", "hold-prefills") as (server, url):
        with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            register(client, target, "file.processed")
            file = client.files.create(file=("a.txt", b"told later"), purpose="user_data")
        kill(server)
    assert target.got == []
    with serving(tmp_path, webhook_allow_private=True) as again:
        until(lambda: target.types() == ["file.processed"])
        assert target.events()[0]["data"]["id"] == file.id
        until(lambda: again.objects.count_due("watch") == 0)
        with pytest.raises(APIError):
            again.client().webhooks.retrieve("we_none")


def at(url: str) -> StoredObject:
    data = {"url": url, "secret": "whsec_c2VjcmV0", "old_secret": None, "old_until": 0.0}
    return StoredObject("endpoint", "t", "we_1", data, 1, 0.0, None)
