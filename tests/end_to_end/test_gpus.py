"""A worker with two ranks (processes of a CPU stand for GPUs): a rank that is killed costs time, and nothing else."""

import json
import os
import signal
from pathlib import Path

import psutil

from tests.end_to_end.server import Server, running
from tests.engine.tiny_models import SHAPE, save_model
from tests.service.prompt_models import save_folder


def tiny_model(folder: Path) -> Path:
    """Random weights, a token a byte, a chat template."""
    from transformers import LlamaConfig

    save_model(folder, LlamaConfig(**SHAPE | {"vocab_size": 320, "num_attention_heads": 2}, tie_word_embeddings=True))
    config = (folder / "config.json").read_text()
    save_folder(folder, "chatml")
    (folder / "config.json").write_text(config)
    return folder


def ranks_of(server: Server) -> list[int]:
    children = psutil.Process(server.worker_pid()).children()
    return [child.pid for child in children if "multiprocessing.spawn" in " ".join(child.cmdline())]


def test_a_killed_rank_costs_no_document(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model")
    settings = {"model": model, "device": "cpu", "dtype": "float32", "threads": 1, "lease_s": 3, "checkpoint_s": 0}
    with running(tmp_path / "data", gpus=2, **settings) as server:
        worker, (rank,) = server.worker_pid(), ranks_of(server)
        text = " ".join(str(number * 7919) for number in range(3_000))
        file_id = server.client().files.create(file=("numbers.txt", text.encode()), purpose="user_data").id
        server.wait_for(file_id, progress=0.3)
        os.kill(rank, signal.SIGKILL)
        document = server.wait_for(file_id)
        assert (document["state"], document["kv"]) == ("ready", "stored")
        assert document["num_tokens"] > 4 * 4096
        assert server.worker_pid() != worker, "another worker process took over"
        assert len(ranks_of(server)) == 1
        log = [json.loads(line) for line in server.log.read_text().splitlines() if line.startswith("{")]
        assert any("rank 1 of 2 is gone: exit status -9" in entry["message"] for entry in log)
        (rank,) = ranks_of(server)
        server.kill(server.worker_pid())
        psutil.Process(rank).wait(30)
