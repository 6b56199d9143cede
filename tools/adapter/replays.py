"""The base model's own answers to short prompts: replayed in every step, they keep its chat and summaries alive."""

import random
from collections.abc import Sequence

import numpy as np
import torch

from tools.adapter.generate import answer, prefill
from tools.adapter.model import Base
from tools.adapter.prompts import ASSISTANT, SYSTEM, Codec, Replay
from tools.adapter.windows import Window

_BATCH = 512
_MAX_NEW_TOKENS = 128


def base_replies(base: Base, codec: Codec, prompts: Sequence[str], seed: int, temperature: float = 0.7) -> list[Replay]:
    """Sampled replies of the model as it came, with its own rotary base and no adapter."""
    projections = base.merged(None)
    rope_base = base.shape.rope_base
    generator = torch.Generator(device=base.device).manual_seed(seed)
    turns = [codec.encode(f"<|im_start|>user\n{prompt}{ASSISTANT}") for prompt in prompts]
    shared = prefill(base, projections, codec.encode(SYSTEM), rope_base)
    replays: list[Replay] = []
    for start in range(0, len(turns), _BATCH):
        batch = turns[start : start + _BATCH]
        replies = answer(
            base, projections, shared, batch, max_new_tokens=_MAX_NEW_TOKENS, stop_id=codec.stop_id,
            rope_base=rope_base, temperature=temperature, generator=generator,
        )  # fmt: skip
        for turn, reply in zip(batch, replies, strict=True):
            # A reply cut off by the limit has no stop token: its end must not be learnt as one.
            finished = [codec.stop_id] if len(reply) < _MAX_NEW_TOKENS else []
            replays.append(Replay(turn, reply + finished))
    return replays


def pack_replays(replays: Sequence[Replay], codec: Codec, rng: random.Random | None, rows: int) -> Window:
    """Short chats, each its own segment from position 0; drawn at random, or in order without `rng`."""
    system = codec.encode(SYSTEM)
    ids = np.full(rows, codec.stop_id, np.int64)
    positions, segments, targets = np.zeros(rows, np.int64), np.full(rows, -1, np.int64), np.zeros(rows, np.int64)
    weights = np.zeros(rows, np.float32)
    row = 0
    order = rng.sample(range(len(replays)), min(len(replays), rows // 32)) if rng else range(len(replays))
    for i in order:
        asked = system + replays[i].prompt
        both = asked + replays[i].reply
        end = row + len(both)
        if end > rows or not replays[i].reply:
            continue
        ids[row:end] = both
        positions[row:end] = np.arange(len(both))
        segments[row:end] = i
        targets[row + len(asked) - 1 : end - 1] = replays[i].reply
        weights[row + len(asked) - 1 : end - 1] = 1.0
        row = end
    return Window("replay", 0, 0, ids, positions, segments, targets, weights)
