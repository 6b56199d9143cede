"""The API's records and limits on both stores: the embedded database and a real redis-server."""

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


class TestSqliteLimits(LimitsContract):
    @pytest.fixture
    def limits(self, database: Database, clock: Clock) -> SqliteLimits:
        return SqliteLimits(database, clock=clock)


class TestRedisLimits(LimitsContract):
    @pytest.fixture
    def limits(self, client: "redis.Redis", clock: Clock) -> RedisLimits:
        return RedisLimits(client, clock=clock)
