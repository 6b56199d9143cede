"""Train the default model's long-context adapter within a wall-clock budget.

    python -m tools.train_adapter --base FOLDER --out DIR --start engine/default_model/adapter.safetensors

`--base` is a Hugging Face folder (config.json, model.safetensors, tokenizer.json) of the unadapted model. Writes
DIR/adapter.safetensors (also every minute) and DIR/train.json. docs/model.md says what the recipe is and what it gives.
"""

import argparse
import json
import math
import random
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from loadtests.fidelity.filler import load_filler
from tools.adapter.attention import PackedAttention, masked, question_bias, segment_bias
from tools.adapter.model import Adapter, Base
from tools.adapter.producer import WindowProducer
from tools.adapter.prompts import Codec, Replay, short_prompts
from tools.adapter.replays import base_replies, pack_replays
from tools.adapter.windows import Window

# Until this share of the budget: the odds of each document length, shortest first. Short windows teach the tasks,
# the long ones at the end teach them among many keys.
_PHASES = ((0.35, (0.80, 0.20, 0.0, 0.0)), (0.65, (0.10, 0.75, 0.15, 0.0)), (1.01, (0.0, 0.40, 0.40, 0.20)))
_LANGUAGE_ROWS = 1024
_LANGUAGE_WEIGHT = 0.2
_REPLAY_WEIGHT = 0.5
_WARMUP_STEPS = 20
_SAVE_EVERY_S = 60.0


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    lengths = [int(length) for length in options.lengths.split(",")]
    codec = Codec(options.base)
    filler = load_filler("train", options.text)
    options.out.mkdir(parents=True, exist_ok=True)
    with WindowProducer(codec, filler, lengths, options.question_rows, options.workers, options.seed) as producer:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        base = Base(options.base, device)
        # In bfloat16 the unadapted model's own answers change ("the capital of France" among them).
        teacher = Base(options.base, device, torch.float32)
        adapter = Adapter(base)
        if options.start is not None:
            adapter.load(options.start)
        started = time.monotonic()
        prompts = short_prompts(filler, options.seed, passages=options.prompts)[: options.prompts]
        replays = base_replies(teacher, codec, prompts, options.seed)
        print(f"{len(replays)} replays in {time.monotonic() - started:.1f} s", flush=True)
        trainer = Trainer(base, teacher, adapter, codec, replays, options)
        trainer.run(producer, lengths)


class Trainer:
    """One step: a window and a pack of replays through the model, AdamW on the adapter's factors.

    On the replays the model follows the unadapted one's whole distribution: as plain targets, a few hundred replies
    are learnt by heart within a minute, and other chats then get worse.
    """

    def __init__(
        self,
        base: Base,
        teacher: Base,
        adapter: Adapter,
        codec: Codec,
        replays: Sequence[Replay],
        options: argparse.Namespace,
    ) -> None:
        self.base, self.teacher, self.adapter, self.codec = base, teacher, adapter, codec
        self.replays, self.options = replays, options
        self.teacher_weights = teacher.merged(None)
        self.rng = random.Random(options.seed)
        self.numpy_rng = np.random.default_rng(options.seed)
        self.optimizer = torch.optim.AdamW(
            adapter.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=0.0, fused=base.device.type == "cuda"
        )
        self.history: list[dict[str, Any]] = []

    def run(self, producer: WindowProducer, lengths: Sequence[int]) -> None:
        """Train until the budget or the number of steps is used up; the adapter is saved last."""
        options = self.options
        started = saved = time.monotonic()
        step = 0
        while (elapsed := time.monotonic() - started) < options.budget_s and step < options.steps:
            progress = elapsed / options.budget_s
            window = producer.next(self._length(progress, lengths))
            losses = self._step(window, self._learning_rate(step, progress))
            step += 1
            # Losses stay on the device until they are printed, so that a step doesn't wait for the one before.
            self.history.append({"step": step, "task": window.task, "rows": window.document_rows, "losses": losses})
            if step % options.print_every == 0:
                self._print(step, time.monotonic() - started)
            if time.monotonic() - saved > _SAVE_EVERY_S:
                self._save()
                saved = time.monotonic()
        self._print(step, time.monotonic() - started)
        self._save()

    def _length(self, progress: float, lengths: Sequence[int]) -> int:
        odds = next(odds for until, odds in _PHASES if progress < until)
        return self.rng.choices(lengths, odds[: len(lengths)])[0] if any(odds[: len(lengths)]) else lengths[-1]

    def _learning_rate(self, step: int, progress: float) -> float:
        cosine = 0.03 + 0.97 * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
        return float(self.options.lr) * cosine * min(1.0, (step + 1) / _WARMUP_STEPS)

    def _step(self, window: Window, learning_rate: float) -> Tensor:
        replay = pack_replays(self.replays, self.codec, self.rng, self.options.replay_rows)
        rows = len(window.ids)

        def both(name: str) -> Tensor:
            return self._upload(np.concatenate([getattr(window, name), getattr(replay, name)]))

        ids, positions, targets, weights = map(both, ("ids", "positions", "targets", "weights"))
        questions = self._upload(window.segments)
        attention = PackedAttention(
            window.document_rows,
            question_bias(window.document_rows, window.document_tokens, questions, self.base.dtype),
            segment_bias(self._upload(replay.segments), self.base.dtype),
        )
        hidden = self.base.forward(ids, positions, attention, self.base.merged(self.adapter))

        scored = self._upload(window.weights.nonzero()[0])
        replayed = self._upload(replay.weights.nonzero()[0] + rows)
        last = window.document_tokens - 1
        language = self._upload(self.numpy_rng.integers(last, size=min(_LANGUAGE_ROWS, last)))
        wanted = torch.cat([targets[scored], ids[language + 1]])
        each = F.cross_entropy(self.base.logits(hidden[torch.cat([scored, language])]), wanted, reduction="none")
        answers, plain = each.split([len(scored), len(language)])
        weight = weights[scored]
        answer_loss = (answers * weight).sum() / weight.sum().clamp_min(1e-6)
        language_loss = plain.mean()
        followed = self.base.logits(hidden[replayed]).log_softmax(-1)
        chat_loss = F.kl_div(followed, self._teach(replay), log_target=True, reduction="batchmean")
        loss = answer_loss + _REPLAY_WEIGHT * chat_loss + _LANGUAGE_WEIGHT * language_loss

        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.adapter.parameters(), 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        return torch.stack([answer_loss.detach(), chat_loss.detach(), language_loss.detach()])

    @torch.no_grad()
    def _teach(self, replay: Window) -> Tensor:
        """Log probabilities `[replies' tokens, vocabulary]` of the unadapted model."""
        bias = segment_bias(self._upload(replay.segments), self.teacher.dtype)
        hidden = self.teacher.forward(
            self._upload(replay.ids),
            self._upload(replay.positions),
            lambda _, q, k, v: masked(q, k, v, bias),
            self.teacher_weights,
            self.teacher.shape.rope_base,
        )
        scored = self._upload(replay.weights.nonzero()[0])
        return self.teacher.logits(hidden[scored]).log_softmax(-1)

    def _upload(self, rows: npt.NDArray[Any]) -> Tensor:
        """Rows on the device, without waiting for the step before (a copy from pageable memory would)."""
        tensor = torch.from_numpy(rows)
        device = self.base.device
        return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor

    def _print(self, step: int, elapsed: float) -> None:
        by_task: dict[str, list[float]] = defaultdict(list)
        chats, plain = [], []
        for record in self.history[-self.options.print_every :]:
            losses = record["losses"]
            if isinstance(losses, Tensor):
                record["losses"] = losses.tolist()
            answer, chat, language = record["losses"]
            by_task[str(record["task"])].append(answer)
            chats.append(chat)
            plain.append(language)
        tasks = " ".join(f"{task.replace('niah_', '')} {sum(v) / len(v):.2f}" for task, v in sorted(by_task.items()))
        mean = [sum(values) / max(len(values), 1) for values in (chats, plain)]
        print(f"{elapsed:6.1f} s step {step}: chat {mean[0]:.2f} text {mean[1]:.2f} | {tasks}", flush=True)

    def _save(self) -> None:
        out = self.options.out
        self.adapter.save(out / "adapter.safetensors")
        for record in self.history:
            if isinstance(record["losses"], Tensor):
                record["losses"] = record["losses"].tolist()
        settings = {key: str(value) for key, value in vars(self.options).items()}
        (out / "train.json").write_text(json.dumps({"options": settings, "steps": self.history}))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Train the long-context adapter within a wall-clock budget.")
    parser.add_argument("--base", type=Path, required=True, help="folder of the unadapted model")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--start", type=Path, help="adapter to go on from; from scratch without")
    parser.add_argument("--text", type=Path, action="append", default=[], help="folder with further text, repeatable")
    parser.add_argument("--budget-s", type=float, default=390.0, help="training seconds, set-up not counted")
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--lengths", default="8192,16384,32768,65536", help="document rows, at most four lengths")
    parser.add_argument("--question-rows", type=int, default=1024)
    parser.add_argument("--replay-rows", type=int, default=1024)
    parser.add_argument("--prompts", type=int, default=1500, help="short prompts to replay")
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--lr", type=float, default=8e-4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--print-every", type=int, default=50)
    return parser


if __name__ == "__main__":
    main()
