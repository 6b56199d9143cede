"""Two workers against one, on one machine: `make two-workers`.

Independent documents over Redis, one thread a worker. Counted is from the first prefill's start to the last one's end,
by the queue's own records; runs with one worker and with two alternate, each on a Redis and a folder of its own.
"""

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path

from loadtests.cluster import Client, Cluster, Member, until
from loadtests.http.texts import Texts
from loadtests.quiet import PATIENCE_S, wait_until_quiet
from loadtests.redis_server import RedisServer
from loadtests.results import write_entry
from service.queue.base import Job
from service.queue.redis_queue import RedisQueue
from service.queue.redis_store import RedisStore

COMMAND = "make two-workers"
DOCUMENTS = 16
DOCUMENT_TOKENS = 8000
START_S, END_S = 120.0, 1200.0


def run(workers: int, texts: Texts, documents: int, num_tokens: int) -> float:
    """Seconds that the prefills of all documents took."""
    with tempfile.TemporaryDirectory(prefix="two-workers-") as name, RedisServer(Path(name) / "redis") as redis:
        store = RedisStore(redis.url)
        queue = RedisQueue(store)
        try:
            with Cluster(Path(name), redis.url, threads=1) as cluster:
                api = cluster.api("api")
                members = [cluster.worker(f"worker-{number}") for number in range(workers)]
                until(lambda: _ready(api, members, redis), START_S, "the cluster is not ready")
                client = Client()
                # A process's first prefill is slower than its others: one for each worker.
                _prefill(client, api, [texts.draw(num_tokens).data for _ in range(workers)])
                counted = {job.id for job in queue.jobs("succeeded", limit=1000)}
                _prefill(client, api, [texts.draw(num_tokens).data for _ in range(documents)])
                client.close()
                done = [job for job in queue.jobs("succeeded", limit=1000) if job.id not in counted]
        finally:
            queue.close()
            store.close()
    return _span([job for job in done if job.kind == "prefill"], documents, workers)


def _ready(api: Member, workers: list[Member], redis: RedisServer) -> bool:
    living = redis.client.zrange("{foreword}:worker_seen", 0, -1)
    names = {f"{os.uname().nodename}-{worker.pid}".encode() for worker in workers}
    return names <= set(living) and api.answers("/readyz") == 200


def _prefill(client: Client, api: Member, texts: list[bytes]) -> None:
    files = [client.upload(api, text.decode(), f"{number}.txt") for number, text in enumerate(texts)]
    for file_id in files:
        document = client.processed(api, file_id, END_S)
        if document["status"] != "processed":
            raise RuntimeError(f"a document failed: {document['error']}")


def _span(prefills: list[Job], documents: int, workers: int) -> float:
    if len(prefills) != documents:
        raise RuntimeError(f"{len(prefills)} prefills succeeded, expected {documents}")
    begun = [job.started_at for job in prefills if job.started_at is not None]
    ended = [job.finished_at for job in prefills if job.finished_at is not None]
    seconds = max(ended) - min(begun)
    print(f"{workers} workers: {documents} documents in {seconds:.1f} s", flush=True)
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=DOCUMENTS)
    parser.add_argument("--tokens", type=int, default=DOCUMENT_TOKENS)
    parser.add_argument("--pairs", type=int, default=2)
    parser.add_argument("--patience", type=float, default=PATIENCE_S, help="seconds to wait for a quiet machine")
    parser.add_argument("--dry", action="store_true", help="write no figures")
    arguments = parser.parse_args()
    load, texts = 0.0 if arguments.dry else wait_until_quiet(arguments.patience), Texts(5)
    pairs = [
        tuple(run(workers, texts, arguments.documents, arguments.tokens) for workers in (1, 2))
        for _ in range(arguments.pairs)
    ]
    speedups = [one / two for one, two in pairs]
    print(f"speed-up {', '.join(f'{speedup:.2f}' for speedup in speedups)}", flush=True)
    if not arguments.dry:
        write_entry(
            "two_worker_speedup",
            statistics.median(speedups),
            "ratio",
            better="higher",
            samples=speedups,
            command=COMMAND,
            documents=arguments.documents,
            tokens_each=arguments.tokens,
            seconds={"one worker": [one for one, _ in pairs], "two workers": [two for _, two in pairs]},
            load_before=load,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
