"""Score adapters on RULER's tasks, needles and short chats with dense attention, greedily, within a time budget.

    python -m tools.evaluate_adapter build --base FOLDER --documents FILE
    python -m tools.evaluate_adapter run --base FOLDER --documents FILE --adapter old=PATH --adapter new=PATH --out FILE

`build` needs no GPU. `run` rewrites its JSON after every document, so that what was measured survives a timeout.
"""

import argparse
import json
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from loadtests.fidelity.filler import Filler, load_filler
from loadtests.fidelity.tasks import TASKS, make_document
from tools.adapter.attention import masked, segment_bias
from tools.adapter.generate import answer, prefill
from tools.adapter.model import ROPE_BASE, Adapter, Base, Projections
from tools.adapter.prompts import ASSISTANT, DOCUMENT_CLOSE, DOCUMENT_OPEN, SYSTEM, Codec, Replay, short_prompts
from tools.adapter.replays import base_replies, pack_replays

_CHATS = (
    "What is the capital of France?",
    "Write a short poem about the sea.",
    "Explain what a database index is.",
    "List three tips for sleeping well.",
    "What is 12 plus 30?",
    "Write a Python function that adds two numbers.",
    "Who are you?",
    "Summarize in one sentence: The committee met on Monday to discuss the new bridge. It was decided that building "
    "should begin in spring, once the river has fallen, and that the old ferry will run until the bridge opens.",
)
_REPLAY_ROWS = 4096


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    if options.command == "build":
        build_documents(options)
    else:
        evaluate(options)


def plan(options: argparse.Namespace) -> Iterator[tuple[str, str, int, int]]:
    """(kind, task, tokens, seed) of every document, the most wanted first."""
    lengths = [int(length) for length in options.lengths.split(",")]
    needles = [int(length) for length in options.needle_lengths.split(",")]
    first = lengths[0]
    yield from (("task", task, first, 0) for task in TASKS)
    yield from (("needles", "niah_single_2", length, 0) for length in needles)
    yield from (("plain", task, first, 0) for task in TASKS)
    for length in lengths[1:]:
        yield from (("task", task, length, 0) for task in TASKS)
    for seed in range(1, options.rounds):
        for length in lengths:
            yield from (("task", task, length, seed) for task in TASKS)


def build_documents(options: argparse.Namespace) -> None:
    """Write one JSON line a document: token ids of document and questions, and the answers."""
    build = partial(_build, Codec(options.base), load_filler("eval", options.text))
    context = multiprocessing.get_context("fork")
    with context.Pool(options.workers) as pool, options.documents.open("w") as file:
        for line in pool.imap(build, list(plan(options))):
            file.write(line + "\n")


def _build(codec: Codec, filler: Filler, cell: tuple[str, str, int, int]) -> str:
    kind, task, tokens, seed = cell
    overhead = codec.count(SYSTEM + DOCUMENT_OPEN) + codec.count(DOCUMENT_CLOSE)
    # Question and reply are part of the context that is named.
    document = make_document(
        task, num_tokens=tokens - overhead - 256, seed=1_000_003 + seed, count_tokens=codec.count, filler=filler,
        num_questions=20 if kind == "needles" else 10,
    )  # fmt: skip
    ids = codec.encode(SYSTEM + DOCUMENT_OPEN) + codec.encode(document.text) + codec.encode(DOCUMENT_CLOSE)
    questions = [
        codec.encode(question.text + ASSISTANT + question.answer_prefix)
        if kind == "task"
        else codec.encode(question.text.replace("provided text", "document") + ASSISTANT)
        for question in document.questions
    ]
    return json.dumps(
        {
            "kind": kind, "task": task, "tokens": tokens, "seed": seed, "ids": ids, "questions": questions,
            "answers": [question.answers for question in document.questions],
            "max_new_tokens": max(question.max_new_tokens for question in document.questions),
        }
    )  # fmt: skip


def evaluate(options: argparse.Namespace) -> None:
    deadline = time.monotonic() + options.budget_s
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    codec = Codec(options.base)
    base = Base(options.base, device)
    # In bfloat16 the unadapted model's own answers change; what is compared with is its float32 self.
    reference = Base(options.base, device, torch.float32)
    adapters: dict[str, Projections] = {}
    for name, path in (item.split("=", 1) for item in options.adapter):
        adapter = Adapter(base)
        adapter.load(Path(path))
        with torch.no_grad():
            adapters[name] = base.merged(adapter)
    device_name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    report: dict[str, Any] = {"device": device_name, "torch": torch.__version__, "cells": []}

    def save() -> None:
        options.out.write_text(json.dumps(report, indent=1))

    report["chat"] = chats(base, reference, codec, adapters, load_filler("eval", options.text), options.prompts)
    save()
    with options.documents.open() as file:
        for line in file:
            cell = json.loads(line)
            for name, projections in adapters.items():
                if time.monotonic() > deadline:
                    return
                report["cells"].append({"adapter": name, **score_document(base, codec, projections, cell)})
                save()
            done = report["cells"][-len(adapters) :]
            scores = " ".join(f"{row['adapter']} {row['score']:.3f}" for row in done)
            print(f"{cell['kind']} {cell['task']} {cell['tokens']}: {scores} ({done[0]['seconds']} s)", flush=True)


def score_document(base: Base, codec: Codec, projections: Projections, cell: dict[str, Any]) -> dict[str, Any]:
    """Mean share of the answers found over the document's questions, and every reply."""
    started = time.monotonic()
    shared = prefill(base, projections, cell["ids"])
    replies = answer(
        base, projections, shared, cell["questions"], max_new_tokens=cell["max_new_tokens"], stop_id=codec.stop_id
    )
    texts = [codec.decode(reply) for reply in replies]
    scores = [
        sum(answer.lower() in text.lower() for answer in answers) / len(answers)
        for text, answers in zip(texts, cell["answers"], strict=True)
    ]
    return {
        **{key: cell[key] for key in ("kind", "task", "tokens", "seed")},
        "document_tokens": len(cell["ids"]),
        "score": sum(scores) / len(scores),
        "scores": scores,
        "replies": texts[:3],
        "answers": cell["answers"][:3],
        "seconds": round(time.monotonic() - started, 2),
    }


@torch.no_grad()
def chats(
    base: Base, reference: Base, codec: Codec, adapters: dict[str, Projections], filler: Filler, num_prompts: int
) -> dict[str, Any]:
    """Greedy replies to short prompts, and the mean NLL of the base model's replies to unseen ones."""
    prompts = short_prompts(filler, seed=7, passages=400)
    unseen = [prompt for prompt in prompts if "\n" in prompt][:num_prompts]
    held_out = base_replies(reference, codec, unseen, seed=7)
    models = {"base": (reference, reference.merged(None), reference.shape.rope_base)}
    models |= {name: (base, projections, ROPE_BASE) for name, projections in adapters.items()}
    result: dict[str, Any] = {}
    turns = [codec.encode(f"<|im_start|>user\n{prompt}{ASSISTANT}") for prompt in _CHATS]
    for name, (model, projections, rope_base) in models.items():
        shared = prefill(model, projections, codec.encode(SYSTEM), rope_base)
        replies = answer(
            model, projections, shared, turns, max_new_tokens=64, stop_id=codec.stop_id, rope_base=rope_base
        )
        result[name] = {
            "nll_of_base_replies": replay_nll(model, codec, projections, held_out, rope_base),
            "replies": dict(zip(_CHATS, map(codec.decode, replies), strict=True)),
        }
        print(f"chat {name}: NLL {result[name]['nll_of_base_replies']:.3f}", flush=True)
    return result


def replay_nll(
    base: Base, codec: Codec, projections: Projections, replays: Sequence[Replay], rope_base: float
) -> float:
    """Mean negative log likelihood of the replies' tokens, in nats."""
    window = pack_replays(replays, codec, None, _REPLAY_ROWS)
    bias = segment_bias(torch.from_numpy(window.segments).to(base.device), base.dtype)
    ids, positions = (torch.from_numpy(rows).to(base.device) for rows in (window.ids, window.positions))
    hidden = base.forward(ids, positions, lambda _, q, k, v: masked(q, k, v, bias), projections, rope_base)
    scored = torch.from_numpy(window.weights.nonzero()[0]).to(base.device)
    targets = torch.from_numpy(window.targets).to(base.device)[scored]
    return float(F.cross_entropy(base.logits(hidden[scored]), targets))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Score adapters with dense attention.")
    parser.add_argument("command", choices=("build", "run"))
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--documents", type=Path, required=True, help="JSON lines, written by `build`")
    parser.add_argument("--text", type=Path, action="append", default=[])
    parser.add_argument("--lengths", default="32768,65536,131072,8192", help="in order of interest")
    parser.add_argument("--needle-lengths", default="4096,8192,16384,32768,65536,131072")
    parser.add_argument("--rounds", type=int, default=3, help="documents a cell")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--adapter", action="append", default=[], metavar="NAME=PATH")
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--budget-s", type=float, default=120.0)
    return parser


if __name__ == "__main__":
    main()
