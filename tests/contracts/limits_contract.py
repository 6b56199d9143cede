"""What every store of limits must do. Backends subclass LimitsContract and give it a `limits` fixture."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from service.limits.base import LimitStore
from tests.contracts.objects_contract import Clock


class LimitsContract:
    @pytest.fixture
    def clock(self) -> Clock:
        return Clock()

    def test_a_bucket_empties_and_fills_again(self, limits: LimitStore, clock: Clock) -> None:
        first = limits.take("key:requests", 1, per_minute=60)
        assert (first.allowed, first.left, first.retry_after_s) == (True, 59, 0)
        assert first.full_after_s == pytest.approx(1)
        assert limits.take("key:requests", 59, per_minute=60).left == 0
        refused = limits.take("key:requests", 3, per_minute=60)
        assert (refused.allowed, refused.left) == (False, 0)
        assert refused.retry_after_s == pytest.approx(3)
        clock.now += 2.5
        assert not limits.take("key:requests", 3, per_minute=60).allowed
        assert limits.take("key:requests", 2, per_minute=60).left == pytest.approx(0.5)
        clock.now += 3600
        assert limits.take("key:requests", 0, per_minute=60).left == 60
        assert limits.take("other", 1, per_minute=1).allowed

    def test_a_clock_set_back_does_no_harm(self, limits: LimitStore, clock: Clock) -> None:
        assert limits.take("key", 10, per_minute=60).left == 50
        clock.now -= 3600
        assert limits.take("key", 10, per_minute=60).left == 40

    def test_slots(self, limits: LimitStore, clock: Clock) -> None:
        assert [limits.hold("key", slot, limit=2, ttl_s=10) for slot in "abc"] == [True, True, False]
        assert limits.hold("other", "c", limit=2, ttl_s=10)
        limits.free("key", "a")
        limits.free("key", "unknown")
        assert limits.hold("key", "c", limit=2, ttl_s=10)

    def test_a_holder_that_dies_gives_its_slot_back(self, limits: LimitStore, clock: Clock) -> None:
        assert limits.hold("key", "dead", limit=2, ttl_s=10)
        assert limits.hold("key", "alive", limit=2, ttl_s=10)
        clock.now += 8
        assert limits.hold("key", "alive", limit=2, ttl_s=10), "renewed, though all are taken"
        assert not limits.hold("key", "new", limit=2, ttl_s=10)
        clock.now += 3
        assert limits.hold("key", "new", limit=2, ttl_s=10)
        assert not limits.hold("key", "another", limit=2, ttl_s=10)

    def test_takes_at_once_never_give_too_much(self, limits: LimitStore) -> None:
        with ThreadPoolExecutor(8) as threads:
            taken = list(threads.map(lambda _: limits.take("key", 1, per_minute=20).allowed, range(60)))
            held = list(threads.map(lambda n: limits.hold("key", str(n), limit=5, ttl_s=60), range(20)))
        assert (sum(taken), sum(held)) == (20, 5)
