"""Limits in Redis: a token bucket is a hash, slots are a sorted set. Implements service.limits.base.LimitStore.

Their keys carry the hash tag of all others: whoever talks to one node of a cluster finds them there.
"""

import time
from collections.abc import Callable
from typing import Any

from service.limits.base import Level, level
from service.redis_errors import unavailable

# A bucket that nobody takes from is full after a minute, and then as good as gone. A full Redis still counts: whoever
# has limits must be let in to delete something.
_TAKE = """#!lua flags=allow-oom
local capacity, amount, now = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local bucket = redis.call('HMGET', KEYS[1], 'level', 'at')
local left = capacity
if bucket[1] then
  left = math.min(capacity, tonumber(bucket[1]) + math.max(0, now - tonumber(bucket[2])) * capacity / 60)
end
local allowed = left >= amount
if allowed then left = left - amount end
redis.call('HSET', KEYS[1], 'level', string.format('%.17g', left), 'at', ARGV[3])
redis.call('EXPIRE', KEYS[1], 120)
return {allowed and 1 or 0, string.format('%.17g', left)}
"""
_HOLD = """#!lua flags=allow-oom
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', ARGV[1])
local others = redis.call('ZCARD', KEYS[1])
if redis.call('ZSCORE', KEYS[1], ARGV[3]) then others = others - 1 end
if others >= tonumber(ARGV[4]) then return 0 end
redis.call('ZADD', KEYS[1], ARGV[2], ARGV[3])
return 1
"""


class RedisLimits:
    """`client` is a redis.Redis made with `decode_responses=True`; it stays the caller's to close.

    Every method may raise QueueUnavailable.
    """

    def __init__(self, client: Any, *, prefix: str = "foreword", clock: Callable[[], float] = time.time) -> None:
        self._client = client
        self._prefix = prefix
        self._clock = clock
        self._take = client.register_script(_TAKE)
        self._hold = client.register_script(_HOLD)

    def take(self, bucket: str, amount: float, *, per_minute: float) -> Level:
        with unavailable():
            arguments = [per_minute, amount, repr(self._clock())]
            allowed, left = self._take(keys=[self._key("bucket", bucket)], args=arguments)
        return level(float(left), amount=amount, per_minute=per_minute, allowed=bool(allowed))

    def hold(self, name: str, slot: str, *, limit: int, ttl_s: float) -> bool:
        now = self._clock()
        with unavailable():
            arguments = [repr(now), repr(now + ttl_s), slot, limit]
            return bool(self._hold(keys=[self._key("slots", name)], args=arguments))

    def free(self, name: str, slot: str) -> None:
        with unavailable():
            self._client.zrem(self._key("slots", name), slot)

    def _key(self, kind: str, name: str) -> str:
        return f"{{{self._prefix}}}:{kind}:{name}"
