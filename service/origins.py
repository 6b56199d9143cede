"""A server without API keys answers programs of this machine, not web pages that a browser of this machine has open.

A page of another site can reach a loopback server in two ways: by sending a form there (the answer stays hidden from
it, the deed is done), and by DNS rebinding, where the attacker's own host name comes to mean 127.0.0.1 and the browser
takes the server for that site. Browsers can't lie about Origin, Sec-Fetch-Site and Host; programs needn't send the
first two. With API keys there is nothing to guard: no page knows the key, and browsers don't add it by themselves.
"""

import ipaddress
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from service.errors import ApiError, Forbidden
from service.settings import Settings

_READING = frozenset({"GET", "HEAD", "OPTIONS"})
# Asked by probes under whatever name the network gives this host, and of no use to a web page.
_PROBES = frozenset({"/livez", "/readyz", "/startupz", "/metrics"})
_DEFAULT_PORTS = {"http": 80, "https": 443}


class OwnPagesOnly:
    """Refuses other Host names than this server's, and state-changing requests that a page of another origin sends."""

    def __init__(self, app: ASGIApp, *, settings: Settings) -> None:
        self._app = app
        self._any_address = settings.insecure
        self._names = frozenset(
            name.strip().lower()
            for name in ("localhost", settings.host, *settings.allowed_hosts.split(","))
            if name.strip()
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in _PROBES:
            try:
                self._check(scope["method"], Headers(scope=scope))
            except ApiError as error:
                await error.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, method: str, headers: Headers) -> None:
        """Raises Forbidden."""
        host = headers.get("host", "")
        if not self._is_ours(host):
            raise Forbidden(
                f"this server has no API keys and is called {host[:200]!r}, a name that it doesn't go by: call it by "
                "localhost or its address, or name that host in FOREWORD_ALLOWED_HOSTS",
                code="forbidden_host",
            )
        if method in _READING:
            return
        if not _sent_by_our_page(headers, host):
            sender = headers.get("origin", "a page of another site")
            raise Forbidden(
                f"this server has no API keys, so pages of other origins may change nothing here; got a {method} from "
                f"{sender[:200]!r}, expected the page at http://{host}",
                code="forbidden_origin",
            )

    def _is_ours(self, host: str) -> bool:
        name = _hostname(f"http://{host}")
        if name in self._names or name.endswith(".localhost"):
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        # No rebinding without a name; beyond loopback people come by whatever address the network gave this host.
        return self._any_address or address.is_loopback


def _sent_by_our_page(headers: Headers, host: str) -> bool:
    """Or by a program, which sends neither header. A browser that came by a plain address sends the origin alone."""
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    if site is not None:
        return site in ("same-origin", "none")
    return origin is None or _is_origin_of(origin, host)


def _hostname(url: str) -> str:
    try:
        return (urlsplit(url).hostname or "").lower()
    except ValueError:
        return ""


def _is_origin_of(origin: str, host: str) -> bool:
    try:
        ours, theirs = urlsplit(f"{urlsplit(origin).scheme}://{host}"), urlsplit(origin)
        default = _DEFAULT_PORTS.get(theirs.scheme)
        return (theirs.hostname, theirs.port or default) == (ours.hostname, ours.port or default) != (None, default)
    except ValueError:
        return False
