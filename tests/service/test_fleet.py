"""What workers and APIs of one Redis must have in common, and where KV lies."""

import dataclasses
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from loadtests.redis_server import RedisServer
from service.backend import FleetDiffers
from service.fleet import Fleet, FleetKV, FleetMember, Identity, site_of
from service.queue.redis_store import RedisStore

IDENTITY = Identity("model-a", "tokenizer-a", {"default": "digest-a"})
MODEL: Any = SimpleNamespace(id="model-a", prompts=SimpleNamespace(tokenizer=SimpleNamespace(digest="tokenizer-a")))


@dataclasses.dataclass
class Report:
    """A KV folder's content."""

    sizes: dict[str, int]

    def describe(self, holder: str) -> dict[str, int]:
        return {"disk": self.sizes[holder]} if holder in self.sizes else {}

    def holders(self) -> dict[str, int]:
        return dict(self.sizes)

    def usage(self) -> dict[str, int]:
        return {"disk": sum(self.sizes.values())}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


class Time:
    def __init__(self) -> None:
        self.now = time.time()

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Time:
    return Time()


@pytest.fixture
def store(server: RedisServer, clock: Time) -> Iterator[RedisStore]:
    server.client.flushall()
    store = RedisStore(server.url, clock=clock)
    yield store
    store.close()


def member(store: RedisStore, name: str, identity: Identity = IDENTITY, **sizes: int) -> FleetMember:
    return FleetMember(store, name, f"site-{name}", identity, Report(sizes))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model": "model-b"}, "model is model-b here and model-a there"),
        ({"tokenizer": "tokenizer-b"}, "tokenizer is tokenizer-b here"),
        ({"digests": {"default": "digest-b"}}, "digest of default is digest-b here and digest-a there"),
    ],
)
def test_who_differs_is_refused_while_others_live(
    store: RedisStore, clock: Time, change: dict[str, Any], named: str
) -> None:
    first, stranger = member(store, "one"), member(store, "two", dataclasses.replace(IDENTITY, **change))
    first.beat()
    with pytest.raises(FleetDiffers, match=rf"{named}.*worker one"):
        stranger.beat()
    member(store, "three").beat()
    clock.now += 11  # nobody has been heard of
    stranger.beat()
    with pytest.raises(FleetDiffers, match="worker two"):
        first.beat()
    stranger.close()
    first.beat()


def test_an_api_sees_the_workers_that_serve_its_model(store: RedisStore, clock: Time, monkeypatch: Any) -> None:
    monkeypatch.setattr("service.fleet.LOOK_S", 0.0)
    fleet = Fleet(store, MODEL)
    assert not fleet.seen()
    fleet.check()
    worker = member(store, "one")
    worker.beat()
    assert fleet.seen()
    assert (fleet.digest("default"), fleet.digest("strict")) == ("digest-a", None)
    assert fleet.names() == ["one"]
    clock.now += 11
    assert not fleet.seen()
    assert fleet.digest("default") is None
    member(store, "two", dataclasses.replace(IDENTITY, model="model-b")).beat()
    assert not fleet.seen(), "its model isn't ours"
    with pytest.raises(FleetDiffers, match="model is model-a here and model-b there"):
        fleet.check()


def test_kv_is_seen_wherever_it_lies(store: RedisStore) -> None:
    local: Any = SimpleNamespace()
    kv = FleetKV(store, Fleet(store, MODEL), local)
    one, two = member(store, "one", **{"doc-1:default": 100, "doc-2:default": 5}), member(store, "two")

    def sizes(holder: str) -> Mapping[str, int]:
        return kv.describe(["another", holder])[holder]

    one.beat()
    two.beat()
    assert sizes("doc-1:default") == {"disk": 100}
    two._kv.sizes["doc-1:default"] = 40  # type: ignore[attr-defined]
    two.beat()
    assert sizes("doc-1:default") == {"disk": 140}
    assert kv.usage() == {}, "each worker shows its own"
    one._kv.sizes.clear()  # type: ignore[attr-defined]
    one.beat()
    assert sizes("doc-1:default") == {"disk": 40}
    assert sizes("doc-2:default") == {}
    again = member(store, "two")  # a new process, whose folder was emptied meanwhile
    again.beat()
    assert sizes("doc-1:default") == {}


def test_a_place_that_is_gone_for_a_month_is_forgotten(store: RedisStore, server: RedisServer, clock: Time) -> None:
    member(store, "one", **{"doc-1:default": 100}).beat()
    FleetKV(store, Fleet(store, MODEL), SimpleNamespace()).set_policy("doc-1:default", ttl_s=None, pinned=True)  # type: ignore[arg-type]
    assert server.client.exists("{foreword}:garbage_at:site-one") == 1
    clock.now += 31 * 86_400
    member(store, "two").beat()
    assert server.client.zrange("{foreword}:sites", 0, -1) == [b"site-two"]
    assert not any(b"site-one" in key for key in server.client.keys("*"))
    assert server.client.exists("{foreword}:kv_at:doc-1:default") == 0


def test_a_site_has_one_name(tmp_path: Path) -> None:
    name = site_of(tmp_path / "data")
    assert site_of(tmp_path / "data") == name
    assert site_of(tmp_path / "other") != name
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["kv-site"]
