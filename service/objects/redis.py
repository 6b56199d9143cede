"""The API's records in Redis: a hash an object, a sorted set for each listing and for what is due.

Implements service.objects.base.Objects. All keys carry one hash tag: each script's keys share a slot of a cluster.
"""

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

from service.objects.base import (
    Json,
    ObjectChanged,
    ObjectExists,
    ObjectKind,
    Order,
    StoredObject,
    UnknownObject,
)
from service.redis_errors import unavailable

# Keys: object, listing, due. Members of listings sort by creation first, of equal times by id.
# Only what makes an object is refused by a full Redis: all else goes on with what is there, to its end.
_CREATE = """
if redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
redis.call('HSET', KEYS[1], 'data', ARGV[2], 'version', 1, 'created_at', ARGV[3], 'due_at', ARGV[4])
redis.call('ZADD', KEYS[2], ARGV[3], ARGV[1])
if ARGV[4] ~= '' then redis.call('ZADD', KEYS[3], ARGV[4], ARGV[5]) end
return 1
"""
_REPLACE = """#!lua flags=allow-oom
if redis.call('HGET', KEYS[1], 'version') ~= ARGV[1] then return 0 end
redis.call('HSET', KEYS[1], 'data', ARGV[2], 'version', ARGV[1] + 1, 'due_at', ARGV[3])
if ARGV[3] ~= '' then redis.call('ZADD', KEYS[2], ARGV[3], ARGV[4]) else redis.call('ZREM', KEYS[2], ARGV[4]) end
return 1
"""
_CLAIM = """#!lua flags=allow-oom
local claimed = {}
for _, name in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', ARGV[1], 'LIMIT', 0, ARGV[3])) do
  local key = ARGV[4] .. name
  if redis.call('EXISTS', key) == 0 then
    redis.call('ZREM', KEYS[1], name)
  else
    redis.call('ZADD', KEYS[1], ARGV[2], name)
    redis.call('HINCRBY', key, 'version', 1)
    redis.call('HSET', key, 'due_at', ARGV[2])
    table.insert(claimed, name)
    table.insert(claimed, redis.call('HMGET', key, 'data', 'version', 'created_at', 'due_at'))
  end
end
return claimed
"""
_DELETE = """#!lua flags=allow-oom
redis.call('DEL', KEYS[1])
redis.call('ZREM', KEYS[2], ARGV[1])
redis.call('ZREM', KEYS[3], ARGV[2])
"""


class RedisObjects:
    """`client` is a redis.Redis made with `decode_responses=True`; it stays the caller's to close.

    Every method may raise QueueUnavailable.
    """

    def __init__(self, client: Any, *, prefix: str = "foreword", clock: Callable[[], float] = time.time) -> None:
        self._client = client
        self._root = f"{{{prefix}}}:objects"
        self._clock = clock
        self._create, self._replace, self._claim, self._delete = (
            client.register_script(text) for text in (_CREATE, _REPLACE, _CLAIM, _DELETE)
        )

    def create(
        self, kind: ObjectKind, tenant: str, object_id: str, data: Json, *, due_at: float | None = None
    ) -> StoredObject:
        now, name = self._clock(), _name(tenant, object_id)
        keys = [self._key(kind, name), self._listing(kind, tenant), self._due(kind)]
        if not self._run(self._create, keys, [object_id, _encode(data), repr(now), _number(due_at), name]):
            raise ObjectExists(f"{kind} {object_id!r} is there already")
        return StoredObject(kind, tenant, object_id, dict(data), 1, now, due_at)

    def get(self, kind: ObjectKind, tenant: str, object_id: str) -> StoredObject:
        fields = ("data", "version", "created_at", "due_at")
        with unavailable():
            values = self._client.hmget(self._key(kind, _name(tenant, object_id)), fields)
        if values[0] is None:
            raise UnknownObject(f"no {kind} {object_id!r}")
        return _decode(kind, tenant, object_id, values)

    def find(
        self, kind: ObjectKind, tenant: str, *, limit: int, after: str | None = None, order: Order = "desc"
    ) -> Sequence[StoredObject]:
        listing, start = self._listing(kind, tenant), 0
        with unavailable():
            if after is not None:
                rank = (self._client.zrank if order == "asc" else self._client.zrevrank)(listing, after)
                if rank is None:
                    raise UnknownObject(f"no {kind} {after!r}")
                start = rank + 1
            ids = self._client.zrange(listing, start, start + limit - 1, desc=order == "desc")
        found = []
        for object_id in ids:
            try:
                found.append(self.get(kind, tenant, object_id))
            except UnknownObject:  # deleted between two looks
                continue
        return found

    def replace(self, stored: StoredObject, data: Json, *, due_at: float | None) -> StoredObject:
        name = _name(stored.tenant, stored.id)
        keys = [self._key(stored.kind, name), self._due(stored.kind)]
        if not self._run(self._replace, keys, [stored.version, _encode(data), _number(due_at), name]):
            raise ObjectChanged(f"{stored.kind} {stored.id!r} is no longer at version {stored.version}")
        return StoredObject(
            stored.kind, stored.tenant, stored.id, dict(data), stored.version + 1, stored.created_at, due_at
        )

    def delete(self, kind: ObjectKind, tenant: str, object_id: str) -> None:
        name = _name(tenant, object_id)
        keys = [self._key(kind, name), self._listing(kind, tenant), self._due(kind)]
        self._run(self._delete, keys, [object_id, name])

    def claim_due(self, kind: ObjectKind, *, lease_s: float, limit: int) -> Sequence[StoredObject]:
        now = self._clock()
        arguments = [repr(now), repr(now + lease_s), limit, self._key(kind, "")]
        claimed = self._run(self._claim, [self._due(kind)], arguments)
        found = []
        for name, values in zip(claimed[::2], claimed[1::2], strict=True):
            object_id, _, tenant = name.partition("\n")
            found.append(_decode(kind, tenant, object_id, values))
        return found

    def count_due(self, kind: ObjectKind) -> int:
        with unavailable():
            return int(self._client.zcard(self._due(kind)))

    def _key(self, kind: str, name: str) -> str:
        return f"{self._root}:{kind}:one:{name}"

    def _listing(self, kind: str, tenant: str) -> str:
        return f"{self._root}:{kind}:of:{tenant}"

    def _due(self, kind: str) -> str:
        return f"{self._root}:{kind}:due"

    def _run(self, script: Any, keys: list[str], arguments: list[Any]) -> Any:
        with unavailable():
            return script(keys=keys, args=arguments)


def _name(tenant: str, object_id: str) -> str:
    """Ids hold no line feed, so that a name can be taken apart whatever a tenant is called."""
    return f"{object_id}\n{tenant}"


def _decode(kind: ObjectKind, tenant: str, object_id: str, values: Sequence[str]) -> StoredObject:
    data, version, created_at, due_at = values
    return StoredObject(
        kind, tenant, object_id, json.loads(data), int(version), float(created_at), float(due_at) if due_at else None
    )


def _encode(data: Json) -> str:
    return json.dumps(data, separators=(",", ":"), ensure_ascii=False)


def _number(value: float | None) -> str:
    return "" if value is None else repr(value)
