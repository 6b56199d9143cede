"""One answer's decoding as a CUDA graph: a token costs one launch, whatever the number of layers."""

import torch

from engine import forward
from engine.cuda.memory import new_stream
from engine.cuda.prefix import DeviceLayer
from engine.interfaces import SCALE_TOKENS
from engine.model import Model
from kernels.decode_attention import decode_attention, pages_view


class GraphDecoder:
    """Tokens of one answer behind a prefix on the device; the answer's own KV is
    [layers, 2, kv_heads, capacity, head_dim], its capacity whole pages of 128."""

    def __init__(
        self, model: Model, own: torch.Tensor, prefix: list[DeviceLayer] | None, past: int, *, next_row: int
    ) -> None:
        """`past` tokens are in the prefix, `next_row` of `own` are filled: row `next_row` is what the next token gets.

        Warm-up and capture compute that row with a token of 0, which the first `step` writes over.
        """
        self._model, self._own, self._prefix = model, own, prefix
        device = model.device
        self._token = torch.zeros(1, dtype=torch.int64, device=device)
        self._row = torch.full((1,), next_row, dtype=torch.int64, device=device)
        self._past = past
        pages = own.shape[3] // SCALE_TOKENS
        self._own_table = torch.arange(pages, dtype=torch.int32, device=device)[None]
        far_pages = -(-past // SCALE_TOKENS)
        self._far_table = torch.arange(far_pages, dtype=torch.int32, device=device)[None]
        self._far_length = torch.full((1,), past, dtype=torch.int32, device=device)
        stream = new_stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            self._compute()  # compiles what is not compiled yet, which a capture must not do
        torch.cuda.current_stream(device).wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._logits = self._compute()

    def step(self, token: int, row: int) -> torch.Tensor:
        """Logits [vocabulary] float32 behind `token`, whose KV goes into `row` of the answer's own."""
        self._token.fill_(token)
        self._row.fill_(row)
        self._graph.replay()
        return self._logits

    def _compute(self) -> torch.Tensor:
        model = self._model
        hidden = forward.embed(model, self._token)
        angles = (self._row + self._past).float()[:, None] * model.inverse_frequencies
        at = forward.Rotation(angles.cos() * model.rope_factor, angles.sin() * model.rope_factor)
        length = (self._row + 1).to(torch.int32)
        for index, weights in enumerate(model.layers):
            q, k, v = forward.queries_keys_values(model, weights, hidden, at)
            own = self._own[index]
            own.index_copy_(2, self._row, torch.stack((k, v)).transpose(1, 2))
            out, lse = decode_attention(q, pages_view(own[0]), pages_view(own[1]), self._own_table, length)
            if self._prefix is not None:
                far, far_lse = self._prefix[index].decode(q, self._far_table, self._far_length)
                share = torch.sigmoid(far_lse - lse)[..., None]
                out = (out * (1 - share) + far * share).to(q.dtype)
            hidden = forward.finish_layer(model, weights, hidden, out)
        return forward.logits(model, hidden)[0]
