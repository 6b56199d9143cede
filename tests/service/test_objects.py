"""The API's records and limits on both stores: the embedded database and a real redis-server."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from service.database import Database
from service.limits.redis import RedisLimits
from service.limits.sqlite import SqliteLimits
from service.objects.redis import RedisObjects
from service.objects.sqlite import SqliteObjects
from service.queue.base import QueueUnavailable
from tests.contracts.limits_contract import LimitsContract
from tests.contracts.objects_contract import Clock, ObjectsContract
from tests.service.redis_server import redis_server


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    database = Database(tmp_path / "foreword.sqlite")
    yield database
    database.close()


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with redis_server(tmp_path_factory.mktemp("redis")) as url:
        yield url


@pytest.fixture
def client(redis_url: str) -> Iterator["redis.Redis"]:
    with redis.Redis.from_url(redis_url, decode_responses=True) as client:
        client.flushdb()
        yield client


class TestSqliteObjects(ObjectsContract):
    @pytest.fixture
    def objects(self, database: Database, clock: Clock) -> SqliteObjects:
        return SqliteObjects(database, clock=clock)


class TestRedisObjects(ObjectsContract):
    @pytest.fixture
    def objects(self, client: "redis.Redis", clock: Clock) -> RedisObjects:
        return RedisObjects(client, clock=clock)

    def test_away_is_unavailable(self) -> None:
        with redis.Redis(port=1, decode_responses=True, retry=Retry(NoBackoff(), 0)) as away:
            objects, limits = RedisObjects(away), RedisLimits(away)
            with pytest.raises(QueueUnavailable):
                objects.get("batch", "t", "x")
            with pytest.raises(QueueUnavailable):
                objects.create("batch", "t", "x", {})
            with pytest.raises(QueueUnavailable):
                limits.take("key", 1, per_minute=1)

    def test_a_full_redis_makes_nothing_new_and_what_is_there_goes_on(self, client: "redis.Redis") -> None:
        objects, limits = RedisObjects(client), RedisLimits(client)
        for name in ("batch_1", "batch_2"):
            objects.create("batch", "t", name, {"status": "in_progress"}, due_at=time.time())
        client.config_set("maxmemory", "1mb")
        try:
            with pytest.raises(QueueUnavailable, match="full"):
                objects.create("batch", "t", "batch_3", {})
            (claimed,) = objects.claim_due("batch", lease_s=20, limit=1)
            ended = objects.replace(claimed, {"status": "cancelled"}, due_at=None)
            assert objects.get("batch", "t", claimed.id) == ended
            objects.delete("batch", "t", claimed.id)
            assert limits.take("key", 1, per_minute=5).allowed, "whoever has limits must be let in to delete something"
            assert limits.hold("key", "slot", limit=1, ttl_s=60)
            limits.free("key", "slot")
        finally:
            client.config_set("maxmemory", "0")
        assert [stored.id for stored in objects.find("batch", "t", limit=9)] == [
            name for name in ("batch_1", "batch_2") if name != claimed.id
        ]


class TestSqliteLimits(LimitsContract):
    @pytest.fixture
    def limits(self, database: Database, clock: Clock) -> SqliteLimits:
        return SqliteLimits(database, clock=clock)


class TestRedisLimits(LimitsContract):
    @pytest.fixture
    def limits(self, client: "redis.Redis", clock: Clock) -> RedisLimits:
        return RedisLimits(client, clock=clock)
