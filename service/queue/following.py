"""Reading a job's event log to its end: look, and where there is nothing new wait for news, then look again."""

import asyncio
import time
from collections.abc import Callable

from service.queue.base import Event
from service.queue.waiters import Waiters

Read = Callable[[], tuple[list[Event], bool]]  # events so far unseen, and whether more may come


def next_events(read: Read, waiters: Callable[[], Waiters], key: str, timeout_s: float) -> list[Event]:
    found, more = read()
    if found or not more or timeout_s <= 0:
        return found
    deadline = time.monotonic() + timeout_s
    with waiters().watch(key) as news:
        while True:
            found, more = read()
            left_s = deadline - time.monotonic()
            if found or not more or left_s <= 0:
                return found
            news.wait(left_s)
            news.clear()


async def next_events_async(read: Read, waiters: Callable[[], Waiters], key: str, timeout_s: float) -> list[Event]:
    """The same without a thread a waiter."""
    found, more = await asyncio.to_thread(read)
    if found or not more or timeout_s <= 0:
        return found
    deadline = time.monotonic() + timeout_s
    with waiters().watch_async(key) as news:
        while True:
            found, more = await asyncio.to_thread(read)
            left_s = deadline - time.monotonic()
            if found or not more or left_s <= 0:
                return found
            try:
                await asyncio.wait_for(news.wait(), left_s)
            except TimeoutError:
                continue  # reads once more and returns
            news.clear()
