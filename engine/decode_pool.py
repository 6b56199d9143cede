"""Decoding in batches on the CPU: one pass over the weights gives a token to every answer that waits for one.

Whoever is stepped first computes for all; the others find their logits ready. A pass always has the same number of
rows, so that an answer's bits depend neither on its neighbours nor on whether it has any.
"""

from typing import Protocol

import torch

from engine import forward
from engine.model import Model

# As many as a pass has rows. One row costs about as much: reading the weights is what takes the time.
ROWS = 16


class Decoding(Protocol):
    """An answer between two of its tokens."""

    @property
    def next_token(self) -> int:
        """The last token, whose row has not been computed yet."""
        ...

    @property
    def position(self) -> int:
        """Of that token."""
        ...

    def attend_row(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """One row, q [1, heads, head_dim] and k, v [1, kv_heads, head_dim], over all before it and itself."""
        ...

    def row_done(self, logits: torch.Tensor) -> None:
        """The row is computed; logits [vocabulary] float32 of what follows."""
        ...


class DecodePool:
    """The answers of one engine that are being decoded. Not thread-safe, as the engine isn't."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._waiting: list[Decoding] = []  # in the order in which they came to wait

    def wait(self, answer: Decoding) -> None:
        """`answer` wants its next row, now or along with another's."""
        self._waiting.append(answer)

    def leave(self, answer: Decoding) -> None:
        """Its next row is not wanted any more; safe for one that doesn't wait."""
        self._waiting = [other for other in self._waiting if other is not answer]

    def compute(self, answer: Decoding) -> None:
        """The row of `answer`, which waits, and of up to 15 others that do."""
        others = [other for other in self._waiting if other is not answer]
        batch = [answer, *others[: ROWS - 1]]
        self._waiting = others[ROWS - 1 :]
        for member, logits in zip(batch, self._forward(batch), strict=False):
            member.row_done(logits)

    def _forward(self, batch: list[Decoding]) -> torch.Tensor:
        """[16, vocabulary]; rows without an answer are padding."""
        model, count = self._model, len(batch)
        tokens = [member.next_token for member in batch] + [0] * (ROWS - count)
        # One position at a time: vectors and their remainders may round differently.
        rotations = [forward.rotation(model, member.position, 1) for member in batch]
        rotations += [forward.rotation(model, 0, 1)] * (ROWS - count)
        at = forward.Rotation(torch.cat([one.cos for one in rotations]), torch.cat([one.sin for one in rotations]))
        hidden = forward.embed(model, torch.tensor(tokens, device=model.device))
        for index, layer in enumerate(model.layers):
            q, k, v = forward.queries_keys_values(model, layer, hidden, at)
            attended = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
            for row, member in enumerate(batch):
                one = slice(row, row + 1)
                attended[one] = member.attend_row(index, q[one], k[one], v[one])
            hidden = forward.finish_layer(model, layer, hidden, attended)
        return forward.logits(model, hidden)
