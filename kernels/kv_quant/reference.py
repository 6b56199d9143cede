"""KV quantisation in plain PyTorch. INT8 rounds halves up, which every device does alike."""

import torch

LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}  # magnitude that 128 tokens' largest value is stored as
SCALE_TOKENS = 128


def quantise_kv(x: torch.Tensor, stored: torch.Tensor, scales: torch.Tensor, rounded: torch.Tensor | None) -> None:
    compute = torch.promote_types(x.dtype, torch.float32)
    tokens, most = x.shape[1], LARGEST[stored.dtype]
    padded = torch.nn.functional.pad(x.to(compute), (0, 0, 0, -tokens % SCALE_TOKENS))
    tiles = padded.view(x.shape[0], -1, SCALE_TOKENS, x.shape[2])
    largest = tiles.abs().amax((2, 3))
    scales.copy_(torch.where(largest > 0, largest / most, 1.0))
    scaled = (tiles / scales[..., None, None]).clamp(-most, most)
    if stored.dtype == torch.int8:
        scaled = (scaled + 0.5).floor()
    stored.copy_(scaled.to(stored.dtype).flatten(1, 2)[:, :tokens])
    if rounded is not None:
        dequantise_kv(stored, scales, rounded)


def dequantise_kv(stored: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
    per_token = scales.repeat_interleave(SCALE_TOKENS, 1)[:, : stored.shape[1], None]
    out.copy_(stored.float() * per_token)
