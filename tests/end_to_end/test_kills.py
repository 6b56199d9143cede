"""kill -9, of the worker and of everything: nothing is lost, and a prefill goes on from a layer boundary."""

import threading
from pathlib import Path

import httpx

from tests.end_to_end.server import Server, running
from tests.end_to_end.test_main_job import file_part, stream, text_part, upload
from tests.end_to_end.text import library_text, question, with_needles


class Heartbeat:
    """Asks /livez again and again in the background; remembers every answer that was not 200."""

    def __init__(self, server: Server) -> None:
        self.url = f"{server.url}/livez"
        self.answers = 0
        self.failures: list[str] = []
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self.run)

    def run(self) -> None:
        while not self.stopped.wait(0.05):
            try:
                status = httpx.get(self.url, timeout=5).status_code
                if status != 200:
                    self.failures.append(str(status))
                self.answers += 1
            except httpx.TransportError as error:
                self.failures.append(repr(error))

    def __enter__(self) -> "Heartbeat":
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopped.set()
        self.thread.join()


def test_worker_killed_half_way_goes_on_from_a_layer_boundary(tmp_path: Path) -> None:
    with running(tmp_path / "data", lease_s=3, checkpoint_s=0.5) as server:
        client = server.client()
        text, needles = with_needles(library_text(36_000), 1, seed=5)
        file_id = client.files.create(file=("long.py", text.encode()), purpose="user_data").id
        with Heartbeat(server) as heartbeat:
            server.wait_for(file_id, progress=0.5)
            server.kill(server.worker_pid())
            document = server.wait_for(file_id)
        assert document["state"] == "ready"
        assert document["num_tokens"] > 2 * 4096, "behind the crossover, too"
        assert heartbeat.answers > 20
        assert heartbeat.failures == []
        num_layers = 30
        recomputed = server.metric("foreword_layers_recomputed_total")
        assert 0 <= recomputed < num_layers / 2
        assert server.metric("foreword_prefills_resumed_total") == 1
        key, number = next(iter(needles.items()))
        answer, usage = stream(client, [file_part(file_id), text_part(question(key))])
        assert number in answer
        assert usage.prompt_tokens_details.cached_tokens >= document["num_tokens"]


def test_everything_killed_then_served_again(tmp_path: Path) -> None:
    data = tmp_path / "data"
    finished, needles = with_needles(library_text(16_000), 1, seed=6)
    with running(data, lease_s=3, checkpoint_s=0.5) as server:
        client = server.client()
        done_id = upload(client, "done.py", finished)
        text, _ = with_needles(library_text(24_000, skip=10), 1, seed=8)
        running_id = client.files.create(file=("running.py", text.encode()), purpose="user_data").id
        server.wait_for(running_id, progress=0.3)
        server.kill()
    with running(data, lease_s=3) as server:
        client = server.client()
        assert {item.id for item in client.files.list()} == {done_id, running_id}
        key, number = next(iter(needles.items()))
        answer, usage = stream(client, [file_part(done_id), text_part(question(key))])
        assert number in answer
        assert usage.prompt_tokens_details.cached_tokens > 4096, "its KV was kept"
        assert server.wait_for(running_id)["state"] == "ready"


def test_upload_is_durable_once_answered(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with running(data) as server:
        file_id = server.client().files.create(file=("notes.txt", b"kept " * 400), purpose="user_data").id
        server.kill()
    with running(data, lease_s=3) as server:
        assert server.wait_for(file_id)["state"] == "ready"
        assert server.client().files.content(file_id).read() == b"kept " * 400
