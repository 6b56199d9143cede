"""What a flood costs the other tenants: `make fairness`.

Twenty tenants, an API key each, all of them busy: each has two rounds under way at all times. In a flood one of them
has forty under way, not two. Phases without and with the flood alternate on the same server. A round is a question of
some hundred tokens without a document, or, with `--work documents`, an upload of a small document and a question about
it. Its wait is what its jobs waited before their work began, from the queue's own records; `flood_p95_ratio` is the
95th percentile in the flood over that without, of the tenant that fares worst, the flooding one left out.

    python -m loadtests.fairness --only embedded     one machine's `foreword serve`, SQLite
    python -m loadtests.fairness --only cluster      an API and a worker over Redis

The engine is the tests' fake one, which takes its time and computes nothing; `--engine real` has the default model.
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from loadtests.cluster import Cluster, until
from loadtests.http.samples import percentile
from loadtests.http.server import LocalServer, write_keys
from loadtests.http.texts import Texts
from loadtests.quiet import PATIENCE_S, wait_until_quiet
from loadtests.redis_server import RedisServer
from loadtests.results import write_entry
from service.database import Database, database_path
from service.queue.base import Job, Queue
from service.queue.redis_queue import RedisQueue
from service.queue.redis_store import RedisStore
from service.queue.sqlite_queue import SqliteQueue

COMMAND = "make fairness"
TENANTS = 20
EACH = 2  # rounds that a tenant has under way
FLOOD = 40  # rounds that the flooding tenant has under way
ANSWER_TOKENS = 8
WARM_UP_S = 10.0  # of each phase: what began in it doesn't count
TEXT_TOKENS = 200  # of a question without a document, or of a document
TIMEOUT_S = 300.0

KEYS = {f"key-{number:02}": f"tenant-{number:02}" for number in range(TENANTS)}
FLOODING = "tenant-00"


@dataclass(frozen=True)
class Place:
    """A running service, and its queue as it stands on disk or in Redis."""

    url: str
    queue: Queue
    engine: str  # fake | real


FAKE = "fake: 50 ms a prefill, 2.5 ms a token"
REAL = "the default model"


def engine_settings(folder: Path, engine: str) -> dict[str, Any]:
    if engine == "real":
        return {}
    from tests.service.prompt_models import save_folder

    return {"model": save_folder(folder / "model", "chatml")}


@contextmanager
def embedded(folder: Path, engine: str = "fake") -> Iterator[Place]:
    program = ("-m", "foreword", "serve") if engine == "real" else ("-m", "tests.service.fake_serve")
    settings = engine_settings(folder, engine)
    with LocalServer(folder, keys=KEYS, program=program, disk_floor_bytes=0, **settings) as server:
        database = Database(database_path(server.data_dir))
        queue = SqliteQueue(database)
        try:
            yield Place(server.url, queue, engine)
        finally:
            queue.close()
            database.close()


@contextmanager
def cluster(folder: Path, engine: str = "fake") -> Iterator[Place]:
    write_keys(folder / "keys.json", KEYS)
    with ExitStack() as stack:
        redis = stack.enter_context(RedisServer(folder / "redis"))
        members = stack.enter_context(
            Cluster(
                folder,
                redis.url,
                worker=("-m", "foreword", "worker") if engine == "real" else ("-m", "tests.service.fake_worker"),
                api_keys_file=folder / "keys.json",
                **engine_settings(folder, engine),
            )
        )
        api = members.api("api")
        members.worker("worker")
        until(lambda: api.answers("/readyz") == 200, 60, "the cluster is not ready")
        store = RedisStore(redis.url)
        stack.callback(store.close)
        queue = RedisQueue(store)
        stack.callback(queue.close)
        yield Place(api.url, queue, engine)


PLACES = {"embedded": embedded, "cluster": cluster}


async def run_phase(place: Place, texts: Texts, seconds: float, work: str, *, flood: bool) -> None:
    """Every tenant's rounds, one behind the other, until time is up; then what is under way is left to its end.

    Raises httpx.HTTPError where a request fails.
    """
    deadline = time.monotonic() + seconds

    async def user(client: httpx.AsyncClient, model: str) -> None:
        while time.monotonic() < deadline:
            text = texts.draw(TEXT_TOKENS, needles=1)
            question = f"STORY {next(iter(text.numbers))}"  # the fake engine's answer is a long one then
            content: list[dict[str, Any]] = [{"type": "text", "text": f"{text.data.decode()}\n{question}"}]
            if work == "documents":
                files = {"file": (text.name, text.data)}
                uploaded = await client.post("/v1/files", files=files, data={"purpose": "user_data"})
                file_id = uploaded.raise_for_status().json()["id"]
                content = [{"type": "file", "file": {"file_id": file_id}}, {"type": "text", "text": question}]
            body = {
                "model": model,
                "messages": [{"role": "user", "content": content}],
                "max_tokens": ANSWER_TOKENS,
            }
            (await client.post("/v1/chat/completions", json=body)).raise_for_status()

    limits = httpx.Limits(max_connections=None, keepalive_expiry=2.0)
    async with AsyncExitStack() as stack:
        users = []
        for key, tenant in KEYS.items():
            headers = {"authorization": f"Bearer {key}"}
            client = httpx.AsyncClient(base_url=place.url, headers=headers, timeout=TIMEOUT_S, limits=limits)
            await stack.enter_async_context(client)
            model = (await client.get("/v1/models")).raise_for_status().json()["data"][0]["id"]
            users += [user(client, model) for _ in range(FLOOD if flood and tenant == FLOODING else EACH)]
        await asyncio.gather(*users)


def waits(jobs: Sequence[Job], since: float, until_s: float) -> dict[str, list[float]]:
    """Seconds that each round waited for its work to begin, by tenant; of rounds begun in [since, until_s)."""
    prefills = {job.payload["document_id"]: job for job in jobs if job.kind == "prefill"}
    found = defaultdict(list)
    for answer in jobs:
        if answer.kind != "answer":
            continue
        began_at, waited_s = answer.created_at, _started_at(answer) - answer.created_at
        for document_id in answer.payload["documents"]:
            prefill = prefills[document_id]
            began_at = prefill.payload["uploaded_at"]
            waited_s += _started_at(prefill) - began_at - prefill.payload["ingest_seconds"]
        if since <= began_at < until_s:
            found[answer.tenant].append(waited_s)
    return dict(found)


def _started_at(job: Job) -> float:
    assert job.started_at is not None
    return job.started_at


def ratios(quiet: Mapping[str, Sequence[float]], flood: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """95th percentile in the flood over that without it, of each tenant but the flooding one."""
    names = sorted(set(quiet) & set(flood) - {FLOODING})
    return {name: percentile(flood[name], 0.95) / percentile(quiet[name], 0.95) for name in names}


def measure(
    place: Place, seconds: float, pairs: int, work: str = "questions"
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Waits by tenant without and with the flood, of so many phases of each, in turn."""
    pools: tuple[dict[str, list[float]], dict[str, list[float]]] = (defaultdict(list), defaultdict(list))
    texts = Texts(7)
    for phase in range(2 * pairs):
        flood, began = phase % 2 == 1, time.time()
        asyncio.run(run_phase(place, texts, WARM_UP_S + seconds, work, flood=flood))
        found = waits(place.queue.jobs("succeeded", limit=1_000_000), began + WARM_UP_S, began + WARM_UP_S + seconds)
        for tenant, more in found.items():
            pools[flood][tenant] += more
        print(f"{'flood' if flood else 'quiet'}: {summary(found)}", flush=True)
    return pools


def summary(found: Mapping[str, Sequence[float]]) -> str:
    others = [percentile(values, 0.95) for tenant, values in found.items() if tenant != FLOODING]
    counts = [len(values) for tenant, values in found.items() if tenant != FLOODING]
    flooding = found.get(FLOODING, [])
    return (
        f"{min(counts)} to {max(counts)} rounds a tenant, p95 wait {min(others):.2f} to {max(others):.2f} s; "
        f"the flooding tenant {len(flooding)} rounds, {percentile(flooding, 0.95):.2f} s"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=sorted(PLACES))
    parser.add_argument("--work", choices=("questions", "documents"), default="questions")
    parser.add_argument("--engine", choices=("fake", "real"), default="fake")
    parser.add_argument("--seconds", type=float, default=75.0, help="of each phase, behind its warm-up")
    parser.add_argument("--pairs", type=int, default=2, help="phases without and with the flood")
    parser.add_argument("--patience", type=float, default=PATIENCE_S, help="seconds to wait for a quiet machine")
    parser.add_argument("--dry", action="store_true", help="write no figures")
    arguments = parser.parse_args()
    for name in [arguments.only] if arguments.only else PLACES:
        load = 0.0 if arguments.dry else wait_until_quiet(arguments.patience)
        with (
            tempfile.TemporaryDirectory(prefix="fairness-") as folder,
            PLACES[name](Path(folder), arguments.engine) as place,
        ):
            quiet, flood = measure(place, arguments.seconds, arguments.pairs, arguments.work)
        found = ratios(quiet, flood)
        worst = max(found, key=lambda tenant: found[tenant])
        print(f"{name}: worst {found[worst]:.3f}, median {statistics.median(found.values()):.3f}", flush=True)
        if not arguments.dry:
            write_entry(
                entry_name(name, arguments.work, arguments.engine),
                found[worst],
                "ratio",
                better="lower",
                samples=list(found.values()),
                command=f"{COMMAND} ARGS='--only {name} --work {arguments.work} --engine {arguments.engine}'",
                engine=REAL if place.engine == "real" else FAKE,
                work=arguments.work,
                answer_tokens=ANSWER_TOKENS,
                tenants=TENANTS,
                rounds_under_way={"each tenant": EACH, "the flooding one in the flood": FLOOD},
                rounds={"quiet": _counts(quiet), "flood": _counts(flood)},
                p95_wait_s={"quiet": _spread(quiet), "flood": _spread(flood)},
                flooding_p95_wait_s=percentile(flood[FLOODING], 0.95),
                load_before=load,
            )
    return 0


def entry_name(place: str, work: str, engine: str) -> str:
    usual = ("embedded", "questions", "fake")
    return "_".join(["flood_p95_ratio", *(word for word in (place, work, engine) if word not in usual)])


def _counts(found: Mapping[str, Sequence[float]]) -> dict[str, int]:
    flooding = len(found[FLOODING])
    return {"others": sum(map(len, found.values())) - flooding, "flooding tenant": flooding}


def _spread(found: Mapping[str, Sequence[float]]) -> list[float]:
    """The least and the greatest of the other tenants' 95th percentiles."""
    values = [percentile(waited, 0.95) for tenant, waited in found.items() if tenant != FLOODING]
    return [min(values), max(values)]


if __name__ == "__main__":
    sys.exit(main())
