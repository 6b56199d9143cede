"""Two APIs and two workers with the default model over a real Redis: what is killed in the middle ends once."""

import threading
from collections import Counter
from pathlib import Path

from loadtests.cluster import Client, Cluster, Member, until
from loadtests.redis_server import RedisServer
from tests.end_to_end.text import library_text, question, with_needles

LEASE_S = 2.0


def jobs(redis: RedisServer, kind: str) -> list[dict[str, str]]:
    found = []
    for key in redis.client.scan_iter("{foreword}:job:*"):
        job = {name.decode(): value.decode() for name, value in redis.client.hgetall(key).items()}
        found += [job] if job["kind"] == kind else []
    return found


def runner(redis: RedisServer, workers: list[Member]) -> Member | None:
    """The worker inside a prefill, some way in."""
    for job in jobs(redis, "prefill"):
        if job["state"] == "running" and 0.1 < float(job.get("progress", 0)) < 0.7:
            return next(worker for worker in workers if job["worker"].endswith(f"-{worker.pid}"))
    return None


def test_work_ends_once_whatever_dies(tmp_path: Path) -> None:
    with RedisServer(tmp_path / "redis") as redis, Cluster(tmp_path, redis.url, lease_s=LEASE_S) as cluster:
        # Workers of one machine share its data folder, and with it KV and resume points.
        machine = tmp_path / "machine"
        workers = [cluster.worker(name, data_dir=machine, checkpoint_s=0) for name in ("worker-1", "worker-2")]
        apis = [cluster.api(name) for name in ("api-1", "api-2")]
        until(lambda: all(api.answers("/readyz") == 200 for api in apis), 120)
        until(lambda: redis.client.zcard("{foreword}:worker_seen") == 2, 120)
        client = Client(timeout_s=120)

        text, needles = with_needles(library_text(5_000), 1)
        key, number = next(iter(needles.items()))
        first = client.upload(apis[0], text, "first.py")
        answer = client.ask(apis[1], first, question(key), max_tokens=24)  # waits for the prefill
        assert number in answer["choices"][0]["message"]["content"]
        again = client.upload(apis[1], text, "first.py")
        assert client.processed(apis[0], again)["kv"] == "stored"
        assert len(jobs(redis, "prefill")) == 1, "one tenant's identical uploads are prefilled once"

        text, needles = with_needles(library_text(9_000, skip=4), 1, seed=9)
        key, number = next(iter(needles.items()))
        second = client.upload(apis[0], text, "second.py")
        victim = until(lambda: runner(redis, workers), 60, "no prefill runs")
        victim.kill()
        apis[0].kill()
        redis.kill()
        timer = threading.Timer(0.5, redis.start)
        timer.start()
        document = client.processed(apis[1], second, 120)
        timer.join()
        assert document["state"] == "ready"
        assert 1_500 < document["num_tokens"] <= 4_096
        answer = client.ask(apis[1], second, question(key), max_tokens=24)
        assert number in answer["choices"][0]["message"]["content"]
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= document["num_tokens"]

        for kind, expected in (("ingest", 3), ("prefill", 2), ("answer", 2)):
            found = jobs(redis, kind)
            assert [job["state"] for job in found] == ["succeeded"] * expected
            for job in found:
                log = redis.client.xrange(f"{{foreword}}:events:{job['id']}")
                assert Counter(fields[b"t"] for _, fields in log)[b"done"] == 1
        assert sorted(int(job["attempts"]) for job in jobs(redis, "prefill")) == [1, 2]
        client.close()
