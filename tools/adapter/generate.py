"""Answers to several questions about one prefilled document, together in one batch."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tools.adapter.attention import SharedDocument
from tools.adapter.model import ROPE_BASE, Base, Projections


@torch.no_grad()
def prefill(base: Base, projections: Projections, ids: Sequence[int], rope_base: float = ROPE_BASE) -> SharedDocument:
    """Read the document densely and keep its KV."""
    shared = SharedDocument()
    tokens = torch.tensor(ids, device=base.device)
    positions = torch.arange(len(ids), device=base.device)
    base.forward(tokens, positions, shared.prefill, projections, rope_base)
    return shared


@torch.no_grad()
def answer(
    base: Base,
    projections: Projections,
    shared: SharedDocument,
    questions: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop_id: int,
    rope_base: float = ROPE_BASE,
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
) -> list[list[int]]:
    """Token ids of each reply, without the stop token; greedy at temperature 0."""
    device = base.device
    lengths = torch.tensor([len(q) for q in questions], device=device)
    longest = max(len(q) for q in questions)
    padded = torch.full((len(questions), longest), stop_id, device=device)
    for i, question in enumerate(questions):
        padded[i, : len(question)] = torch.tensor(question, device=device)
    start = shared.document[0][0].shape[1]
    shared.begin(len(questions), longest + max_new_tokens)
    slots = torch.arange(longest, device=device).expand(len(questions), -1)
    which = torch.arange(len(questions), device=device)

    def step(ids: Tensor, at: Tensor) -> Tensor:
        shared.see(at)
        positions = (at + start).flatten()
        return base.forward(ids.flatten(), positions, shared.attend, projections, rope_base).view(*at.shape, -1)

    hidden = step(padded, slots)[which, lengths - 1]
    done = torch.zeros(len(questions), dtype=torch.bool, device=device)
    replies: list[Tensor] = []
    for i in range(max_new_tokens):
        logits = base.logits(hidden)
        if temperature > 0:
            probabilities = torch.softmax(logits / temperature, dim=-1)
            token = torch.multinomial(probabilities, 1, generator=generator)[:, 0]
        else:
            token = logits.argmax(-1)
        token = token.masked_fill(done, stop_id)
        done |= token == stop_id
        replies.append(token)
        if i + 1 == max_new_tokens or (i % 4 == 3 and bool(done.all())):
            break
        hidden = step(token[:, None], (lengths + i)[:, None])[:, 0]
    rows = torch.stack(replies, dim=1).tolist()
    return [row[: row.index(stop_id)] if stop_id in row else row for row in rows]
