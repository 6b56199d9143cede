"""All questions about one document answered together from its stored KV.

What the engine's answers do one by one (dense attention to the stored prefix and to one's own rows) is done here for a
batch, so that the prefix's KV is read once a step for all questions; `tests/fidelity/test_shared_reading.py` holds both
to the same tokens. Beside greedy replies it gives the likelihood of a given reply, which the engine has no need of.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from engine import forward
from engine.chain import TokenIds
from engine.engine import LocalEngine
from engine.interfaces import Fidelity
from engine.model import Model
from loadtests.fidelity.inside import AttendPrefix, model_of, open_prefix

# Rows whose logits over the whole vocabulary are held at once.
_LOGIT_ROWS = 256


class Reading:
    """A document's stored prefix of `past` tokens, for questions of which each sees the prefix and itself."""

    def __init__(self, model: Model, past: int, attend_prefix: AttendPrefix) -> None:
        self._model, self._past, self._attend_prefix = model, past, attend_prefix

    @classmethod
    @contextmanager
    def open(cls, engine: LocalEngine, prefix: TokenIds, *, salt: bytes, fidelity: Fidelity) -> "Iterator[Reading]":
        """Raises KVMissing, OutOfMemory."""
        with open_prefix(engine, prefix, salt=salt, fidelity=fidelity) as attend:
            yield cls(model_of(engine), len(prefix), attend)

    @torch.inference_mode()
    def ask(
        self,
        questions: Sequence[TokenIds],
        *,
        replies: Sequence[TokenIds],
        max_new_tokens: Sequence[int],
        enough: Callable[[int, list[int]], bool] = lambda question, tokens: False,
    ) -> tuple[list[list[int]], list[float]]:
        """(greedy token ids of each question's reply, mean negative log likelihood of each given reply's tokens, nats).

        A reply ends with an end token, which is not in it, after its `max_new_tokens`, or once `enough(question's
        number, its ids)`. Questions and given replies have at least one token.
        """
        lengths = torch.tensor([len(question) for question in questions], device=self._model.device)
        capacity = max(map(len, questions)) + max(*map(len, replies), *max_new_tokens)
        own = _OwnKV(self._model, self._past, batch=len(questions), capacity=capacity)
        everyone = torch.arange(len(questions), device=self._model.device)
        hidden = self._forward(own, everyone, _padded(questions, self._model.device), torch.zeros_like(lengths))
        last = hidden[everyone, lengths - 1]
        # The given replies' rows lie where the greedy ones' will: those are written over them.
        nlls = self._score(own, everyone, lengths, last, replies)
        return self._generate(own, lengths, last, max_new_tokens, enough), nlls

    def _score(
        self,
        own: "_OwnKV",
        everyone: torch.Tensor,
        lengths: torch.Tensor,
        last: torch.Tensor,
        replies: Sequence[TokenIds],
    ) -> list[float]:
        ids = _padded(replies, self._model.device)
        following = self._forward(own, everyone, ids[:, :-1], lengths) if ids.shape[1] > 1 else last[:, None, :][:, :0]
        hidden = torch.cat((last[:, None], following), 1)
        nlls = []
        for index, reply in enumerate(replies):
            rows, targets = hidden[index, : len(reply)], ids[index, : len(reply)]
            losses = [
                torch.nn.functional.cross_entropy(
                    forward.logits(self._model, rows[first : first + _LOGIT_ROWS]),
                    targets[first : first + _LOGIT_ROWS],
                    reduction="sum",
                )
                for first in range(0, len(reply), _LOGIT_ROWS)
            ]
            nlls.append(float(torch.stack(losses).sum()) / len(reply))
        return nlls

    def _generate(
        self,
        own: "_OwnKV",
        lengths: torch.Tensor,
        last: torch.Tensor,
        max_new_tokens: Sequence[int],
        enough: Callable[[int, list[int]], bool],
    ) -> list[list[int]]:
        produced: list[list[int]] = [[] for _ in max_new_tokens]
        active = list(range(len(produced)))
        hidden, step = last, 0
        while True:
            tokens = forward.logits(self._model, hidden).argmax(-1).tolist()
            going = []
            for place, (index, token) in enumerate(zip(active, tokens, strict=True)):
                if token in self._model.spec.eos_ids:
                    continue
                produced[index].append(token)
                if len(produced[index]) < max_new_tokens[index] and not enough(index, produced[index]):
                    going.append(place)
            if not going:
                return produced
            active = [active[place] for place in going]
            rows = torch.tensor(active, device=hidden.device)
            ids = torch.tensor([[tokens[place]] for place in going], device=hidden.device)
            hidden = self._forward(own, rows, ids, lengths[rows] + step)[:, 0]
            step += 1

    def _forward(self, own: "_OwnKV", batch: torch.Tensor, ids: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        """ids [batch, rows] of the questions `batch` from their own rows `starts` on → [batch, rows, hidden].

        Rows behind a question's end are computed along; what they leave is written over before anybody sees it.
        """
        model, (count, rows) = self._model, ids.shape
        slots = starts[:, None] + torch.arange(rows, device=ids.device)
        end = int(slots.max()) + 1
        at = forward.Rotation(own.rotation.cos[slots.flatten()], own.rotation.sin[slots.flatten()])
        hidden = forward.embed(model, ids.flatten())
        for index, layer in enumerate(model.layers):
            q, k, v = forward.queries_keys_values(model, layer, hidden, at)
            near, near_lse = own.attend(index, batch, slots, end, q, k, v)
            far, far_lse = self._attend_prefix(index, q)
            share = torch.sigmoid(far_lse - near_lse)[..., None]
            out = (near * (1 - share) + far * share).to(q.dtype)
            hidden = forward.finish_layer(model, layer, hidden, out)
        return hidden.view(count, rows, -1)


class _OwnKV:
    """K and V of the questions' own rows."""

    def __init__(self, model: Model, past: int, *, batch: int, capacity: int) -> None:
        spec = model.spec
        self.rotation = forward.rotation(model, past, capacity)
        # Zeros: an unwritten row's share is 0, and 0 × NaN isn't.
        self._kv = torch.zeros(
            spec.num_layers, 2, batch, capacity, spec.kv_heads, spec.head_dim, dtype=model.dtype, device=model.device
        )

    def attend(
        self,
        layer: int,
        batch: torch.Tensor,
        slots: torch.Tensor,
        end: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep k and v of the rows at `slots` [batch, rows], all before `end`; attend causally within each question.

        q [batch × rows, heads, head_dim], k and v likewise with kv_heads. Returns (out, lse [batch × rows, heads]),
        both float32.
        """
        count, rows = slots.shape
        _, heads, head_dim = q.shape
        kv_heads = k.shape[1]
        for kept, new in zip(self._kv[layer], (k, v), strict=True):
            kept[batch[:, None], slots] = new.view(count, rows, kv_heads, head_dim)
        keys, values = (kept[batch, :end].float() for kept in self._kv[layer])
        grouped = q.view(count, rows, kv_heads, heads // kv_heads, head_dim).float()
        scores = torch.einsum("brhgd,bshd->brhgs", grouped, keys) * head_dim**-0.5
        future = torch.arange(end, device=q.device) > slots[..., None]
        scores = scores.masked_fill(future[:, :, None, None], float("-inf"))
        lse = scores.logsumexp(-1)
        out = torch.einsum("brhgs,bshd->brhgd", (scores - lse[..., None]).exp(), values)
        return out.reshape(count * rows, heads, head_dim), lse.reshape(count * rows, heads)


def _padded(ids: Sequence[TokenIds], device: torch.device) -> torch.Tensor:
    """[sequences, longest] int64, 0 behind each end."""
    padded = torch.zeros(len(ids), max(map(len, ids)), dtype=torch.int64)
    for row, sequence in zip(padded, ids, strict=True):
        row[: len(sequence)] = torch.from_numpy(sequence.astype("int64"))
    return padded.to(device)
