"""KV that one machine made answers on another, through a shared tier, encrypted: real workers, model and Redis."""

import base64
import secrets
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from loadtests.cluster import Client, Cluster, until
from loadtests.redis_server import RedisServer
from tests.end_to_end.text import library_text, question, with_needles


@pytest.mark.parametrize("tier", ["directory", "redis"])
def test_another_machine_answers_from_it(tier: str, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(base64.b64encode(secrets.token_bytes(32)).decode(), "ascii")
    with (
        RedisServer(tmp_path / "redis") as redis,
        RedisServer(tmp_path / "kv-redis") as kv_redis,
        Cluster(tmp_path, redis.url, lease_s=2.0) as cluster,
    ):
        far = tmp_path / "shared-kv"
        place = {"kv_shared_dir": far} if tier == "directory" else {"kv_redis_url": kv_redis.url}
        settings = {**place, "kv_key_file": keys}
        first = cluster.worker("worker-1", data_dir=tmp_path / "machine-1", **settings)
        api = cluster.api("api")
        until(lambda: api.answers("/readyz") == 200 and redis.client.zcard("{foreword}:worker_seen") == 1, 120)
        client = Client(timeout_s=120)
        text, needles = with_needles(library_text(5_000), 1)
        key, number = next(iter(needles.items()))
        file_id = client.upload(api, text, "first.py")
        client.processed(api, file_id, 120)

        def copied() -> bool:
            if tier == "redis":
                return bool(kv_redis.client.hlen("{foreword-kv}:segments"))
            with closing(sqlite3.connect(f"file:{far}/index.sqlite3?mode=ro", uri=True)) as index:
                return bool(index.execute("SELECT COUNT(*) FROM copies WHERE state = 'stored'").fetchone()[0])

        until(copied, 30, "nothing was copied to the shared tier")
        first.kill()
        cluster.worker("worker-2", data_dir=tmp_path / "machine-2", **settings)
        answer = client.ask(api, file_id, question(key), max_tokens=24)
        assert number in answer["choices"][0]["message"]["content"]
        assert answer["foreword"]["cache_state"] == "warm_shared"
        again = client.ask(api, file_id, question(key), max_tokens=24)
        assert again["choices"][0]["message"]["content"] == answer["choices"][0]["message"]["content"]
        assert again["foreword"]["cache_state"] in ("warm_disk", "warm_host"), "it was copied to this machine"
        client.close()
