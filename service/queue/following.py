"""Reading a job's event log to its end: look, and where there is nothing new wait for news, then look again.

News that get lost on their way are the waiters' business: whoever wakes them looks for such by a timer.
"""

import asyncio
import time
from collections.abc import Callable

from service.queue.base import Event
from service.queue.waiters import Waiters

Read = Callable[[], tuple[list[Event], bool]]  # events so far unseen, and whether more may come


def next_events(read: Read, waiters: Callable[[], Waiters], key: str, timeout_s: float) -> list[Event]:
    if timeout_s <= 0:
        return read()[0]
    deadline = time.monotonic() + timeout_s
    with waiters().watch(key) as news:  # before the look, so that no news falls in between
        while True:
            found, more = read()
            if found or not more or not news.wait(max(0.0, deadline - time.monotonic())):
                return found
            news.clear()


async def next_events_async(read: Read, waiters: Callable[[], Waiters], key: str, timeout_s: float) -> list[Event]:
    """The same without a thread a waiter, and with one look while there is nothing new: thousands wait at once."""
    if timeout_s <= 0:
        return (await asyncio.to_thread(read))[0]
    deadline = time.monotonic() + timeout_s
    with waiters().watch_async(key) as news:
        while True:
            found, more = await asyncio.to_thread(read)
            if found or not more:
                return found
            try:
                await asyncio.wait_for(news.wait(), max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                return []
            news.clear()
