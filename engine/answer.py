"""An answer in steps: the question's rows attend densely to the prefix's stored KV and to themselves, then token by
token. The question's and the answer's own KV stay in memory."""

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import torch

from engine import forward
from engine.errors import EngineError
from engine.interfaces import AnswerDelta, AnswerRequest, CacheState
from engine.model import LayerWeights, Model
from engine.prefix_kv import PrefixKV
from engine.sampling import Sampler
from engine.text_stream import TextStream
from kernels.dense_attention import dense_attention
from kernels.full_attention import full_attention

_ROW_TILE = 512


class DenseAnswer:
    """`Answer` of engine.interfaces. Several may be active; each is stepped on its own."""

    def __init__(
        self,
        model: Model,
        request: AnswerRequest,
        prefix: PrefixKV | None,
        decode: Callable[[Sequence[int]], str],
        release: Callable[[], None],
    ) -> None:
        self._model, self._request, self._prefix, self._release = model, request, prefix, release
        self._past = prefix.num_tokens if prefix is not None else 0
        spec = model.spec
        capacity = len(request.question) + request.sampling.max_tokens
        self._kv = torch.empty(spec.num_layers, 2, spec.kv_heads, capacity, spec.head_dim, dtype=model.dtype)
        self._own = 0  # rows of it that are filled
        self._next = torch.from_numpy(np.asarray(request.question, dtype=np.int64))
        self._sampler = Sampler(request.sampling)
        self._text = TextStream(decode, request.sampling.stop)
        self._tier: CacheState = prefix.tier if prefix is not None else "cold"
        self._completion_tokens = 0
        self._over = False

    def step(self) -> AnswerDelta:
        """The first step computes the question's rows and gives the first token. Raises KVMissing, EngineError."""
        if self._over:
            raise EngineError("the answer has ended")
        try:
            with torch.inference_mode():
                logits = self._forward(self._next)
        except BaseException:
            self.close()
            raise
        if self._prefix is not None:
            self._tier = self._prefix.tier
        token = self._sampler.pick(logits)
        self._completion_tokens += 1
        if token in self._model.spec.eos_ids:
            return self._end("", (), "stop")
        text = self._text.push(token)
        if self._text.stopped:
            return self._end(text, (token,), "stop")
        if self._completion_tokens >= self._request.sampling.max_tokens:
            return self._end(text, (token,), "length")
        self._next = torch.tensor([token])
        return AnswerDelta(text, (token,))

    def _end(self, text: str, tokens: tuple[int, ...], reason: Literal["stop", "length"]) -> AnswerDelta:
        text += self._text.finish()
        # A stop string may have been completed by what was held back at the token limit.
        reason = "stop" if self._text.stopped else reason
        self.close()
        return AnswerDelta(text, tokens, reason)

    @property
    def kv_tier(self) -> CacheState:
        return self._tier

    @property
    def prompt_tokens(self) -> int:
        return self._past + len(self._request.question)

    @property
    def completion_tokens(self) -> int:
        return self._completion_tokens

    def close(self) -> None:
        if not self._over:
            self._over = True
            self._kv = torch.empty(0)
            self._prefix = None
            self._release()

    def _forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Logits [vocabulary] of the last of `token_ids`, whose KV is appended to this answer's own."""
        model, start = self._model, self._past + self._own
        hidden = forward.embed(model, token_ids)
        tiles = [slice(first, first + _ROW_TILE) for first in range(0, len(token_ids), _ROW_TILE)]
        rotations = [forward.rotation(model, start + tile.start, len(hidden[tile])) for tile in tiles]
        for index, layer in enumerate(model.layers):
            prefix = self._prefix.layer(index) if self._prefix is not None else None
            for tile, at in zip(tiles, rotations, strict=True):
                hidden[tile] = self._layer(layer, self._kv[index], prefix, hidden[tile], at, self._own + tile.start)
        self._own += len(token_ids)
        return forward.logits(model, hidden[-1:])[0]

    def _layer(
        self,
        layer: LayerWeights,
        own: torch.Tensor,
        prefix: torch.Tensor | None,
        hidden: torch.Tensor,
        at: forward.Rotation,
        row: int,
    ) -> torch.Tensor:
        """Rows from `row` of this answer's own; own and prefix are [2, kv_heads, tokens, head_dim]."""
        q, k, v = forward.queries_keys_values(self._model, layer, hidden, at)
        end = row + len(hidden)
        own[0, :, row:end], own[1, :, row:end] = k.transpose(0, 1), v.transpose(0, 1)
        out, lse = dense_attention(q, own[0, :, :end], own[1, :, :end], row_offset=row)
        if prefix is not None:
            far, far_lse = full_attention(q, prefix[0], prefix[1])
            share = torch.sigmoid(far_lse - lse)[..., None]
            out = (out * (1 - share) + far * share).to(q.dtype)
        return forward.finish_layer(self._model, layer, hidden, out)
