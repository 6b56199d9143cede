"""From FOREWORD_REDIS_URL to a client.

    redis://[user[:password]@]host[:port][/db]            a single Redis
    rediss://…?ssl_ca_certs=ca.pem                        the same over TLS
    unix://path?db=0                                      a socket of this machine
    redis+sentinel://[user[:password]@]host[:port][,host[:port]…]/service[/db][?sentinel_username=…&sentinel_password=…]
    rediss+sentinel://…                                   the same over TLS

Options behind `?` are redis-py's (ssl_ca_certs, ssl_certfile, ssl_keyfile, …).
"""

from typing import Any
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit, urlunsplit

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from redis.sentinel import Sentinel, SentinelConnectionPool, SentinelManagedSSLConnection

CONNECT_S = 2.0
REPLY_S = 5.0
SENTINEL_PORT = 26379
SCHEMES = ("redis", "rediss", "unix", "redis+sentinel", "rediss+sentinel")


class InvalidRedisUrl(ValueError):
    """FOREWORD_REDIS_URL can't be read as one."""

    code = "invalid_redis_url"


def open_client(url: str, *, decode_responses: bool = False) -> Any:
    """A thread-safe redis.Redis that connects with the first command and itself repeats none.

    Raises InvalidRedisUrl.
    """
    options: dict[str, Any] = {
        "decode_responses": decode_responses,
        "socket_connect_timeout": CONNECT_S,
        "socket_timeout": REPLY_S,
        "socket_keepalive": True,
        "health_check_interval": 15,
        "retry": Retry(NoBackoff(), 0),
    }
    scheme = url.partition("://")[0]
    if scheme not in SCHEMES:
        raise InvalidRedisUrl(
            f"FOREWORD_REDIS_URL has the scheme {scheme[:20]!r}; expected one of {', '.join(SCHEMES)}"
        )
    try:
        if scheme.endswith("+sentinel"):
            return _sentinel_client(url, options)
        return redis.Redis.from_url(url, **options)
    except (ValueError, TypeError) as error:
        raise InvalidRedisUrl(f"FOREWORD_REDIS_URL ({shown(url)}): {error}") from error


def shown(url: str) -> str:
    """The URL without its secrets, for logs and messages."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    user = parts.netloc.rpartition("@")[0].partition(":")[0]
    return urlunsplit((parts.scheme, f"{user}@{host}" if user else host, parts.path, "", ""))


def _sentinel_client(url: str, options: dict[str, Any]) -> Any:
    parts = urlsplit(url)
    credentials, _, hosts = parts.netloc.rpartition("@")
    user, _, password = (unquote(part) for part in credentials.partition(":"))
    service, _, database = parts.path.strip("/").partition("/")
    if not hosts or not service:
        raise ValueError("redis+sentinel://host:port,…/service is expected")
    query = dict(parse_qsl(parts.query))
    sentinel_options = {
        name: query.pop(f"sentinel_{name}") for name in ("username", "password") if f"sentinel_{name}" in query
    }
    # redis-py's own parser knows what its options mean.
    known = redis.ConnectionPool.from_url(f"redis://sentinel?{urlencode(query)}").connection_kwargs
    known.pop("host", None)
    for name, value in (("username", user), ("password", password), ("db", database)):
        if value:
            known[name] = int(value) if name == "db" else value
    addresses = [_address(host) for host in hosts.split(",")]
    sentinel = Sentinel(addresses, sentinel_kwargs={**options, **sentinel_options})  # type: ignore[no-untyped-call]
    if parts.scheme == "rediss+sentinel":
        known["connection_class"] = SentinelManagedSSLConnection
    pool = SentinelConnectionPool(service, sentinel, is_master=True, **{**known, **options})  # type: ignore[no-untyped-call]
    return redis.Redis(connection_pool=pool)


def _address(host: str) -> tuple[str, int]:
    name, _, port = host.rpartition(":")
    return (name.strip("[]"), int(port)) if name else (port, SENTINEL_PORT)
