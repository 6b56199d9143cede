"""The ways to a Redis: passwords, ACL users, TLS, Sentinel, one slot of a cluster; and what is refused by name."""

import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from loadtests.cluster import ROOT
from loadtests.redis_server import RedisServer, free_port
from service.documents.redis import RedisDocuments
from service.limits.redis import RedisLimits
from service.objects.redis import RedisObjects
from service.queue.base import Effects, NewJob, QueueUnavailable, RecordChange
from service.queue.redis_queue import RedisQueue
from service.queue.redis_store import RedisRefused, RedisStore
from service.queue.redis_url import InvalidRedisUrl, open_client, shown
from tests.contracts.documents_contract import ingest
from tests.service.bench import until


def use(url: str) -> None:
    """Every kind of command that the service sends."""
    store = RedisStore(url)
    store.run("beat", "worker-a", "site-a", "{}", "{}")
    queue, documents = RedisQueue(store, site="site-a"), RedisDocuments(store, site="site-a")
    queue.attend("api-1", for_s=60)
    ingest(queue, documents, "file-1")
    queue.wait(5, ["prefill"])
    job = queue.claim("w", ["prefill"], lease_s=60)
    assert job is not None
    queue.extend(job, lease_s=60)
    queue.progress(job, 0.5)
    queue.finish(job, {}, Effects([RecordChange("prefills", "doc-1:default", {"state": "ready"})]))
    queue.put(NewJob("answer", "t", {"documents": ["doc-1"]}, job_id="answer", reader="api-1"))
    timer = threading.Timer(0.2, lambda: queue.cancel("answer"))
    timer.start()
    assert queue.events("answer", 1, timeout_s=10)[-1].type == "done"
    timer.join()
    queue.reclaim()
    assert [lane.tenant for lane in queue.lanes()] == []
    assert documents.file("t", "file-1").status == "processed"
    assert documents.delete_file("t", "file-1") is not None
    documents.collect(lambda piece: None)
    assert queue.prune(time.time() + 1000) == 3
    queue.close()
    store.close()
    with open_client(url, decode_responses=True) as client:
        keep(client)


def keep(client: Any) -> None:
    """The API's own records and limits."""
    objects, limits, key = RedisObjects(client), RedisLimits(client), secrets.token_hex(4)
    objects.create("batch", "t", f"batch_{key}", {"status": "validating"}, due_at=time.time())
    (claimed,) = objects.claim_due("batch", lease_s=20, limit=1)
    objects.replace(claimed, {"status": "completed"}, due_at=None)
    assert [stored.data["status"] for stored in objects.find("batch", "t", limit=1)] == ["completed"]
    assert objects.count_due("batch") == 0
    objects.create("delivery", "t", "whd_1", {})
    objects.delete("delivery", "t", "whd_1")
    assert limits.take(f"{key}:requests", 1, per_minute=5).left == 4
    assert limits.hold(f"{key}:answers", "slot", limit=1, ttl_s=60)
    limits.free(f"{key}:answers", "slot")


def refused(url: str, match: str, kind: type[QueueUnavailable] = RedisRefused) -> None:
    store = RedisStore(url, patience_s=0.5)
    started = time.monotonic()
    with pytest.raises(kind, match=match):
        store.run("reclaim")
    assert time.monotonic() - started < 5
    store.close()


def test_password_and_acl_user(tmp_path: Path) -> None:
    with RedisServer(tmp_path, "--requirepass", "adm/n pw", password="adm/n pw") as server:
        place = f"127.0.0.1:{server.port}/0"
        use(f"redis://:adm%2Fn%20pw@{place}")
        refused(f"redis://{place}", "Authentication required")
        refused(f"redis://:wrong@{place}", "WRONGPASS|invalid username-password")
        # The user of docs/distributed.md.
        rules = ("on", ">s3cret", "~{foreword*", "+@all", "-@dangerous", "-@admin", "+info", "resetchannels")
        server.client.execute_command("ACL", "SETUSER", "foreword", *rules)
        use(f"redis://foreword:s3cret@{place}")
        server.client.execute_command("ACL", "SETUSER", "reader", "on", ">s3cret", "~{foreword*", "+@read", "+evalsha")
        refused(f"redis://reader:s3cret@{place}", "the user needs every command")


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-keyout", folder / "key.pem", "-out", folder / "cert.pem", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"],
        check=True,
        capture_output=True,
    )  # fmt: skip
    return folder


def test_tls(tmp_path: Path, certificates: Path) -> None:
    certificate, key, port = certificates / "cert.pem", certificates / "key.pem", free_port()
    options = ["--port", "0", "--tls-port", str(port), "--tls-auth-clients", "no"]
    options += ["--tls-cert-file", str(certificate), "--tls-key-file", str(key), "--tls-ca-cert-file", str(certificate)]
    with RedisServer(tmp_path, *options, port=port, ssl=True, ssl_ca_certs=str(certificate)):
        use(f"rediss://localhost:{port}/0?ssl_ca_certs={certificate}")
        refused(f"rediss://localhost:{port}/0", "certificate verify failed", QueueUnavailable)
        refused(f"redis://localhost:{port}/0", "can't be reached", QueueUnavailable)


class Sentinel:
    """One that watches one master, and holds an election as soon as that is silent for half a second."""

    def __init__(self, folder: Path, master_port: int) -> None:
        self.port = free_port()
        config = folder / "sentinel.conf"
        config.write_text(
            f"port {self.port}\nbind 127.0.0.1\ndir {folder}\nsentinel monitor main 127.0.0.1 {master_port} 1\n"
            "sentinel down-after-milliseconds main 500\nsentinel failover-timeout main 5000\n"
        )
        with (folder / "sentinel.log").open("ab") as log:
            self.process = subprocess.Popen(["redis-server", config, "--sentinel"], stdout=log, stderr=log)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[RedisServer, RedisServer, Sentinel]]:
    with RedisServer(tmp_path / "one") as master, RedisServer(tmp_path / "two") as replica:
        replica.client.replicaof("127.0.0.1", master.port)
        sentinel = Sentinel(tmp_path, master.port)
        with redis.Redis(port=sentinel.port) as client:
            until(lambda: _knows_a_replica(client), 30)
        until(lambda: replica.client.info("replication")["master_link_status"] == "up", 30)
        yield master, replica, sentinel
        sentinel.close()


def _knows_a_replica(client: Any) -> bool:
    try:
        return bool(client.sentinel_slaves("main"))
    except redis.RedisError:
        return False


def test_sentinel_names_the_new_master(pair: tuple[RedisServer, RedisServer, Sentinel]) -> None:
    master, replica, sentinel = pair
    store = RedisStore(f"redis+sentinel://127.0.0.1:{sentinel.port}/main/0", patience_s=20)
    queue = RedisQueue(store)
    queue.put(NewJob("answer", "t", {}, job_id="job-1"))
    until(lambda: replica.client.exists("{foreword}:job:job-1"))
    master.kill()
    job = queue.claim("w", ["answer"], lease_s=60)  # waits until there is a master again
    assert job is not None
    assert replica.client.hget("{foreword}:job:job-1", "state") == b"running"
    queue.finish(job, {})
    queue.close()
    store.close()


def test_all_keys_are_in_one_slot_of_a_cluster(tmp_path: Path) -> None:
    # Left to itself the bus takes the port + 10,000, which may be none.
    with RedisServer(tmp_path, "--cluster-enabled", "yes", "--cluster-port", str(free_port())) as server:
        server.client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        until(lambda: b"cluster_state:ok" in server.client.execute_command("CLUSTER", "INFO"), 30)
        use(server.url)
        keys = server.client.keys("*")
        assert all(any(kind in key for key in keys) for kind in (b":objects:", b":bucket:", b":worker"))
        assert len({server.client.execute_command("CLUSTER", "KEYSLOT", key) for key in keys}) == 1


@pytest.mark.parametrize(
    ("url", "match"),
    [
        ("http://localhost", "scheme 'http'"),
        ("localhost:6379", "scheme"),
        ("redis://:pa55@localhost:port/0", "port"),
        ("redis+sentinel://:pa55@localhost:26379", "/service is expected"),
        ("redis://localhost?socket_timeout=soon", "socket_timeout"),
    ],
)
def test_a_wrong_url_is_named_without_its_password(url: str, match: str) -> None:
    with pytest.raises(InvalidRedisUrl, match=match) as caught:
        open_client(url)
    assert "pa55" not in str(caught.value)


def test_what_is_shown_of_a_url() -> None:
    assert shown("rediss://me:pa55@host:1/2?ssl_keyfile_password=pa55") == "rediss://me@host:1/2"
    assert shown("redis://:pa55@host/0") == "redis://host/0"
    assert shown("redis+sentinel://me:pa55@a:1,b:2/main") == "redis+sentinel://me@a:1,b:2/main"


def test_stopped_redis_is_away(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as server:
        assert server.process is not None
        os.kill(server.process.pid, signal.SIGSTOP)
        try:
            refused(f"{server.url}?socket_timeout=1", "can't be reached", QueueUnavailable)
        finally:
            os.kill(server.process.pid, signal.SIGCONT)


def test_without_redis_py_the_missing_extra_is_named(tmp_path: Path) -> None:
    script = (
        "import sys; sys.modules['redis'] = None\n"
        "from contextlib import ExitStack\n"
        "from service.backend import RedisMissing, open_api_backend\n"
        "from service.settings import Settings\n"
        "try:\n"
        "    open_api_backend(Settings(redis_url='redis://localhost'), None, ExitStack())\n"
        "except RedisMissing as error:\n"
        "    print(error.code, error)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.startswith("redis_missing")
    assert "foreword[redis]" in done.stdout
