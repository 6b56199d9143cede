"""An answer in steps: the question's rows attend densely to the prefix's stored KV and to themselves, then token by
token. The question's and the answer's own KV stay in memory."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from engine import forward
from engine.decode_pool import DecodePool
from engine.errors import EngineError
from engine.interfaces import SCALE_TOKENS, AnswerDelta, AnswerRequest, CacheState
from engine.model import LayerWeights, Model
from engine.prefix_kv import Prefix
from engine.sampling import Sampler
from engine.text_stream import TextStream
from kernels.dense_attention import dense_attention

if TYPE_CHECKING:
    from engine.cuda.decoder import GraphDecoder

_ROW_TILE = {"cpu": 512, "cuda": 4096}
# A graph costs a few steps to make: it is made for answers that have gone on for so many.
_GRAPH_AFTER = 2


class DenseAnswer:
    """`Answer` of engine.interfaces. Several may be active; on a CPU their tokens come out of a pool's passes."""

    def __init__(
        self,
        model: Model,
        request: AnswerRequest,
        prefix: Prefix | None,
        decode: Callable[[Sequence[int]], str],
        release: Callable[[], None],
        pool: DecodePool,
    ) -> None:
        self._model, self._request, self._prefix, self._release = model, request, prefix, release
        self._past = prefix.num_tokens if prefix is not None else 0
        spec = model.spec
        # Whole pages, as the decoding kernels want them.
        capacity = -(-(len(request.question) + request.sampling.max_tokens) // SCALE_TOKENS) * SCALE_TOKENS
        shape = (spec.num_layers, 2, spec.kv_heads, capacity, spec.head_dim)
        self._kv = torch.empty(shape, dtype=model.dtype, device=model.device)
        self._own = 0  # rows of it that are filled
        self._next = torch.from_numpy(np.asarray(request.question, dtype=np.int64))
        self._sampler = Sampler(request.sampling)
        self._text = TextStream(decode, request.sampling.stop)
        self._tier: CacheState = prefix.tier if prefix is not None else "cold"
        self._computed = 0
        self._completion_tokens = 0
        self._decoder: GraphDecoder | None = None
        self._pool = pool
        self._ready: torch.Tensor | None = None  # logits that another answer's pass has given
        self._over = False

    def step(self) -> AnswerDelta:
        """The first step computes the question's rows and gives the first token. Raises KVMissing, EngineError."""
        if self._over:
            raise EngineError("the answer has ended")
        try:
            with torch.inference_mode():
                logits = self._logits()
        except BaseException:
            self.close()
            raise
        if self._prefix is not None:
            self._tier, self._computed = self._prefix.tier, self._prefix.computed_tokens
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
        if self._pooled:
            self._pool.wait(self)
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
    def computed_tokens(self) -> int:
        """Of the prefix, known from the first step on: computed again because that was faster than loading it."""
        return self._computed

    @property
    def prompt_tokens(self) -> int:
        return self._past + len(self._request.question)

    @property
    def completion_tokens(self) -> int:
        return self._completion_tokens

    def close(self) -> None:
        if not self._over:
            self._over = True
            self._pool.leave(self)
            self._kv = torch.empty(0)
            self._prefix = self._decoder = None
            self._release()

    # --- Decoding of engine.decode_pool ---

    @property
    def next_token(self) -> int:
        return int(self._next[0])

    @property
    def position(self) -> int:
        return self._past + self._own

    def attend_row(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return self._attend(layer, q, k, v, self._own)

    def row_done(self, logits: torch.Tensor) -> None:
        self._own += 1
        self._ready = logits

    # --- the work ---

    @property
    def _pooled(self) -> bool:
        return self._model.device.type == "cpu"

    def _logits(self) -> torch.Tensor:
        """[vocabulary], on the host, of what follows the last token."""
        if not self._pooled or self._completion_tokens == 0:
            return self._forward(self._next)
        if self._ready is None:
            self._pool.compute(self)
        logits, self._ready = self._ready, None
        assert logits is not None
        return logits

    def _forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Logits [vocabulary], on the host, of the last of `token_ids`, whose KV is appended to this answer's own."""
        if self._decoder is not None or self._make_decoder():
            assert self._decoder is not None
            logits = self._decoder.step(int(token_ids[0]), self._own)
            self._own += 1
            return logits.cpu()
        model, start, count = self._model, self._past + self._own, len(token_ids)
        padding = torch.zeros(_padded_rows(count) - count, dtype=token_ids.dtype)
        hidden = forward.embed(model, torch.cat((token_ids, padding)).to(model.device))
        rows = _ROW_TILE[model.device.type]
        tiles = [slice(first, first + rows) for first in range(0, len(hidden), rows)]
        rotations = [forward.rotation(model, start + tile.start, len(hidden[tile])) for tile in tiles]
        for index, layer in enumerate(model.layers):
            for tile, at in zip(tiles, rotations, strict=True):
                real = min(count - tile.start, rows)
                hidden[tile] = self._layer(index, layer, hidden[tile], at, self._own + tile.start, real)
        self._own += count
        return forward.logits(model, hidden[count - 1 : count])[0].cpu()

    def _make_decoder(self) -> bool:
        """A graph for the tokens that follow, where the device and the prefix allow one."""
        if self._model.device.type != "cuda" or self._completion_tokens != _GRAPH_AFTER:
            return False
        from engine.cuda.decoder import GraphDecoder
        from engine.cuda.prefix import DevicePrefix

        if self._prefix is not None and not isinstance(self._prefix, DevicePrefix):
            return False
        layers = None if self._prefix is None else self._prefix.layers
        self._decoder = GraphDecoder(self._model, self._kv, layers, self._past, next_row=self._own)
        return True

    def _layer(
        self, index: int, layer: LayerWeights, hidden: torch.Tensor, at: forward.Rotation, row: int, real: int
    ) -> torch.Tensor:
        """Rows from `row` of this answer's own, of which the first `real` are tokens and the rest is padding."""
        q, k, v = (part[:real] for part in forward.queries_keys_values(self._model, layer, hidden, at))
        out = self._attend(index, q, k, v, row)
        attended = torch.nn.functional.pad(out, (0, 0, 0, 0, 0, len(hidden) - real))
        return forward.finish_layer(self._model, layer, hidden, attended)

    def _attend(self, index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, row: int) -> torch.Tensor:
        """Rows from `row` of this answer's own over the prefix, its own before them and themselves."""
        own, end = self._kv[index], row + len(q)
        own[0, :, row:end], own[1, :, row:end] = k.transpose(0, 1), v.transpose(0, 1)
        out, lse = dense_attention(q, own[0, :, :end], own[1, :, :end], row_offset=row)
        if self._prefix is not None:
            far, far_lse = self._prefix.attend(index, q)
            share = torch.sigmoid(far_lse - lse)[..., None]
            out = (out * (1 - share) + far * share).to(q.dtype)
        return out


def _padded_rows(count: int) -> int:
    """A few sizes that linears compile once for: multiples of 16 up to 64, then of 64."""
    granule = 16 if count <= 64 else 64
    return -(-count // granule) * granule
