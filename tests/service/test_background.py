"""Work of the API that outlives its request: who has room for it."""

import asyncio
import time
from pathlib import Path

from service.background import Background, Held, Keeper
from service.database import Database
from service.limits.gate import Gate
from service.limits.sqlite import SqliteLimits
from service.objects.sqlite import SqliteObjects


async def test_what_requests_began_takes_no_room_of_what_is_due(tmp_path: Path) -> None:
    database = Database(tmp_path / "foreword.sqlite3")
    objects, ended, document = SqliteObjects(database), asyncio.Event(), asyncio.Event()

    async def keep(held: Held) -> None:
        if held.data["status"] == "waiting":
            await document.wait()
        else:
            ended.set()
        await held.delete()

    background = Background(objects, Gate(SqliteLimits(database)))
    async with background.running({"response": Keeper(keep, most=2)}):
        for number in range(3):
            background.start(
                objects.create("response", "t", f"resp_{number}", {"status": "waiting"}, due_at=time.time() + 60)
            )
        objects.create("response", "other", "resp_asked", {"status": "asked"}, due_at=time.time())
        background.nudge()
        async with asyncio.timeout(20):
            await ended.wait()
        document.set()
        async with asyncio.timeout(20):
            while objects.count_due("response"):
                await asyncio.sleep(0.02)
    database.close()
