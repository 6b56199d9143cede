"""What becomes of a batch: its lines are checked, asked a few at a time, and their rows put into two files."""

import asyncio
import random
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from anyio import to_thread

from service.background import LEASE_S, Held
from service.batch_lines import MAX_ERRORS, Flaw, Line, LineRunner, read_lines
from service.batch_rows import RowStore
from service.dependencies import Services
from service.documents.base import FileRecord
from service.errors import InvalidRequest
from service.intake import derived_id, find_file
from service.objects.base import Json, ObjectChanged
from service.webhooks import announce

MOST_LINES = 8  # asked at once
MOST_A_TENANT = 2  # batches at once, in one process: others' must not wait for a tenant that has many
KEPT_S = 30 * 24 * 3600.0
OUTPUT_PURPOSE = "batch_output"
_ENDS = ("completed", "expired", "cancelled")


class BatchKeeper:
    def __init__(self, services: Services) -> None:
        self._services = services
        self._running: Counter[str] = Counter()  # by tenant

    async def __call__(self, held: Held) -> None:
        tenant = held.stored.tenant
        if held.data["status"] in ("failed", *_ENDS):
            await held.delete()
            return
        is_over = held.data["status"] == "cancelling" or held.data["expires_at"] <= time.time()
        if self._running[tenant] >= MOST_A_TENANT and not is_over:
            await held.put_off(random.uniform(1.0, 3.0))
            return
        self._running[tenant] += 1
        try:
            async with held.renewed():
                await _Run(self._services, held).run()
        finally:
            self._running[tenant] -= 1
            if not self._running[tenant]:
                del self._running[tenant]
        self._services.background.nudge()


class _Run:
    """One keeper's work on one batch, from wherever the last one left it."""

    def __init__(self, services: Services, held: Held) -> None:
        self._services = services
        self._held = held
        self._runner = LineRunner(services, held.stored)
        self._folder = services.settings.files_dir / "batches" / held.stored.id

    async def run(self) -> None:
        """Raises ObjectChanged, QueueError and OSError: then another keeper goes on later."""
        try:
            path = await to_thread.run_sync(self._input)
        except InvalidRequest as error:
            await self._fail([Flaw(None, "input_file_gone", error.message)])
            await to_thread.run_sync(lambda: shutil.rmtree(self._folder, ignore_errors=True))
            return
        if self._held.data["status"] == "validating" and not await self._validate(path):
            return
        rows = await to_thread.run_sync(RowStore, self._folder, self._held.stored.version)
        try:
            end = await self._ask_all(path, rows)
            await self._finalize(rows, end)
            await to_thread.run_sync(rows.remove)
        finally:
            rows.close()

    def _input(self) -> Path:
        file = find_file(self._services, self._held.stored.tenant, self._held.data["input_file_id"])
        if file is None:
            raise InvalidRequest("the input file is gone")
        ((_, path),) = self._services.uploads.paths(file.sources)
        return path

    def _lines(self, path: Path) -> Iterator[Line]:
        for line in read_lines(path, self._held.data["endpoint"]):
            if isinstance(line, Line):
                yield line

    async def _validate(self, path: Path) -> bool:
        def check() -> tuple[int, list[Flaw]]:
            total = 0
            flaws: list[Flaw] = []
            for line in read_lines(path, self._held.data["endpoint"]):
                total += 1
                if isinstance(line, Flaw) and len(flaws) < MAX_ERRORS:
                    flaws.append(line)
            return total, flaws

        total, flaws = await to_thread.run_sync(check)
        if not total:
            flaws = [Flaw(None, "empty_file", "the input file has no lines")]
        if flaws:
            await self._fail(flaws)
            return False
        counts = {"total": total, "completed": 0, "failed": 0}
        await self._save("in_progress", counts=counts)
        return True

    async def _fail(self, flaws: list[Flaw]) -> None:
        await self._save("failed", over=True, errors=[flaw.view() for flaw in flaws])
        await self._announce("failed")

    async def _ask_all(self, path: Path, rows: RowStore) -> str:
        """All lines that have no row yet. Returns what the batch has come to: completed, expired or cancelled."""
        lines = self._lines(path)
        running: dict[asyncio.Task[dict[str, Any]], Line] = {}
        try:
            while True:
                self._held.check()
                end = self._early_end()
                while not end and len(running) < MOST_LINES:
                    line = await to_thread.run_sync(_next, lines, rows)
                    if line is None:
                        break
                    running[asyncio.create_task(self._runner.answer(line))] = line
                if end or not running:
                    break
                ended, _ = await asyncio.wait(running, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
                for task in ended:
                    del running[task]
                    await to_thread.run_sync(rows.append, task.result())
                if ended:
                    await self._held.save({"counts": self._counts(rows)}, due_at=time.time() + LEASE_S)
        except ObjectChanged:
            if await to_thread.run_sync(self._is_cancelled):
                for line in running.values():
                    await to_thread.run_sync(self._runner.end, line)
            raise
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        if end:
            for line in running.values():
                await to_thread.run_sync(self._runner.end, line)
            await to_thread.run_sync(self._write_off, path, rows, end)
        return end or "completed"

    def _early_end(self) -> str:
        if self._held.data["status"] == "cancelling":
            return "cancelled"
        return "expired" if self._held.data["expires_at"] <= time.time() else ""

    def _is_cancelled(self) -> bool:
        """Else another keeper goes on with the batch, and reads what was asked here."""
        stored = self._held.stored
        now = self._services.objects.get("batch", stored.tenant, stored.id)
        return now.data["status"] in ("cancelling", "cancelled")

    def _write_off(self, path: Path, rows: RowStore, end: str) -> None:
        reason = {
            "cancelled": ("batch_cancelled", "the batch was cancelled before this line was answered"),
            "expired": ("batch_expired", "the batch's time was over before this line was answered"),
        }[end]
        for line in self._lines(path):
            if line.custom_id not in rows.done:
                rows.append(self._runner.unanswered(line, *reason))

    async def _finalize(self, rows: RowStore, end: str) -> None:
        if end != "cancelled":
            await self._save("finalizing")
        files = {}
        for kind, wanted in (("output", False), ("error", True)):
            if file_id := await self._file(kind, rows, wanted):
                files[kind] = file_id
        await self._save(end, over=True, files=files, counts=self._counts(rows), usage=rows.usage())
        await self._announce(end)

    async def _file(self, kind: str, rows: RowStore, wanted: bool) -> str | None:
        """The id of a file of the rows that failed, or of those that didn't; None where there are none."""
        services, stored = self._services, self._held.stored
        file_id = derived_id(stored.tenant, stored.id, kind)
        if await to_thread.run_sync(find_file, services, stored.tenant, file_id) is not None:
            return file_id  # an earlier keeper came so far
        path = await to_thread.run_sync(rows.write, kind, wanted)
        if path is None:
            return None
        expiry, now = self._held.data["output_expires_after"], time.time()
        async with services.uploads.open(file_id, stored.tenant) as upload:
            name = f"{stored.id}_{kind}.jsonl"
            await services.uploads.receive_files(upload, name, [path], None)
            record = FileRecord(
                id=file_id,
                tenant=stored.tenant,
                filename=name,
                purpose=OUTPUT_PURPOSE,
                size_bytes=upload.size_bytes,
                created_at=now,
                expires_at=None if expiry is None else now + expiry["seconds"],
                kind="auto",
                fidelity="default",
                priority=0,
                base=None,
                pinned=False,
                kv_ttl_s=None,
                sources=upload.sources,
                status="processed",
                status_details=None,
                error=None,
                ingest_job=None,
                document_id=None,
            )
            await services.uploads.commit(upload, lambda: services.documents.create_file(record))
        return file_id

    async def _announce(self, end: str) -> None:
        stored = self._held.stored
        await to_thread.run_sync(announce, self._services.objects, stored.tenant, f"batch.{end}", stored.id)

    def _counts(self, rows: RowStore) -> Json:
        return {"total": self._held.data["counts"]["total"], "completed": rows.completed, "failed": rows.failed}

    async def _save(self, status: str, *, over: bool = False, **change: Any) -> None:
        now = time.time()
        times = {**self._held.data["times"], status: now}
        due_at = now + (KEPT_S if over else LEASE_S)
        await self._held.save({"status": status, "times": times, **change}, due_at=due_at)


def _next(lines: Iterator[Line], rows: RowStore) -> Line | None:
    return next((line for line in lines if line.custom_id not in rows.done), None)
