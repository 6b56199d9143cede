"""Connections to the internet alone: a name is resolved once, judged, and connected to as that address.

So neither a name that points inwards nor one that changes its mind between two look-ups reaches this machine, its
network, or what a cloud tells its machines of themselves.
"""

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpcore

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]

_NAT64 = ipaddress.ip_network("64:ff9b::/96")
# All that IPv6 has of the internet. Outside lie old ways inwards: site-local ones, IPv4 behind zeros or translators.
_GLOBAL = ipaddress.IPv6Network("2000::/3")
# Protocol assignments, of which Python 3.11 knows a part only; and one that is public by its number, but answered by
# the host of a virtual machine (Azure).
_INWARD = (ipaddress.IPv4Network("192.0.0.0/24"), ipaddress.IPv4Network("168.63.129.16/32"))


class AddressRefused(Exception):
    """The name leads to an address that messages must not be sent to."""


def literal(host: str) -> Address | None:
    """The address that `host` is, None where it is a name."""
    try:
        return ipaddress.ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return None


def is_public(address: Address) -> bool:
    """No private, loopback, link-local, shared, reserved or multicast one, nor an IPv6 address that wraps one."""
    if isinstance(address, ipaddress.IPv6Address):
        wrapped = address.ipv4_mapped or address.sixtofour or (address.teredo and address.teredo[1])
        if address in _NAT64:
            wrapped = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if wrapped:
            return is_public(wrapped)
        if address not in _GLOBAL:
            return False
    return address.is_global and not address.is_multicast and not any(address in network for network in _INWARD)


class PublicNetwork(httpcore.AsyncNetworkBackend):
    """For httpcore: it goes on with TLS for the name that the URL has, over a connection to the address judged here."""

    def __init__(self, *, allow_private: bool = False, resolve: Resolve | None = None) -> None:
        self._allow_private = allow_private
        self._resolve = resolve or self._look_up
        self._inner = httpcore.AnyIOBackend()
        # Of their own: a name server that is silent must not use up the threads that others wait for.
        self._threads = ThreadPoolExecutor(8, thread_name_prefix="resolve")

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """To the first address that answers. Raises AddressRefused, OSError, httpcore.ConnectError, ConnectTimeout."""
        known = literal(host)
        addresses = [str(known)] if known is not None else await self._resolve(host, port)
        for address in addresses:
            judged = literal(address)
            if judged is None or not (self._allow_private or is_public(judged)):
                # Not which one: callers would learn the names of the inside.
                raise AddressRefused(f"{host} leads to no public address")
        failure: Exception = httpcore.ConnectError(f"{host} has no address")
        for address in addresses:
            try:
                return await self._inner.connect_tcp(address, port, timeout, local_address, socket_options)
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                failure = error
        raise failure

    async def connect_unix_socket(
        self,
        path: str,
        timeout: float | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        raise AddressRefused("no socket of this machine may be connected to")

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def _look_up(self, host: str, port: int) -> Sequence[str]:
        def look_up() -> list[str]:
            return [str(info[4][0]) for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]

        return await asyncio.get_running_loop().run_in_executor(self._threads, look_up)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
