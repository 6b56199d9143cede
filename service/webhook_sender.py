"""One webhook on its way: a POST with a deadline, to a public address, over a connection of its own."""

import asyncio
import time
from types import TracebackType

import httpcore

from service.addresses import AddressRefused, PublicNetwork
from service.objects.base import StoredObject
from service.webhooks import signed_headers

TIMEOUT_S = 10.0
CONNECT_S = 5.0


class Undelivered(Exception):
    """Nobody there, no answer in time, or an address that must not be sent to."""


class Sender:
    """No redirects, no proxies, nothing read but the status."""

    def __init__(self, network: PublicNetwork) -> None:
        self._network = network
        self._pool = httpcore.AsyncConnectionPool(
            network_backend=network, max_connections=None, max_keepalive_connections=0, retries=0
        )

    async def __aenter__(self) -> "Sender":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._pool.aclose()
        self._network.close()

    async def send(self, endpoint: StoredObject, event_id: str, body: str) -> int:
        """The status that the endpoint answered with. Raises Undelivered."""
        headers = signed_headers(endpoint, event_id, body, time.time())
        headers["user-agent"] = "Foreword-Webhooks"
        timeouts = dict.fromkeys(("read", "write", "pool"), TIMEOUT_S) | {"connect": CONNECT_S}
        try:
            async with asyncio.timeout(TIMEOUT_S):
                opened = self._pool.stream(
                    "POST",
                    endpoint.data["url"],
                    headers=list(headers.items()),
                    content=body.encode(),
                    extensions={"timeout": timeouts},
                )
                async with opened as response:
                    return int(response.status)
        except TimeoutError as error:
            raise Undelivered(f"no answer within {TIMEOUT_S:.0f} s") from error
        except (AddressRefused, OSError, httpcore.ConnectError, httpcore.TimeoutException) as error:
            raise Undelivered(str(error) or type(error).__name__) from error
        except Exception as error:  # also what the libraries raise when a connection goes while they look at it
            raise Undelivered(f"no HTTP answer: {str(error) or type(error).__name__}") from error
