"""RMSNorm, RoPE, SwiGLU and KV quantisation."""

import pytest
import torch

from kernels import dispatch
from kernels.gated_mlp import gated_mlp
from kernels.kv_quant import STORED_DTYPES, dequantise_kv, quantise_kv
from kernels.kv_quant.reference import LARGEST
from kernels.rms_norm import rms_norm, rms_norm_fp8
from kernels.rope import rope
from kernels.swiglu import swiglu, swiglu_fp8
from tests.kernels.arguments import DTYPES, HAS_GPU, normal, paths
from tests.kernels.tolerances import RELATIVE_ERROR, relative_error

SIZES = [(1, 64), (3, 77), (2, 576), (5, 4096)]


def fp8_error(stored: torch.Tensor, scale: torch.Tensor, want: torch.Tensor) -> float:
    """Largest error in units of e4m3's half step, 2⁻⁴ of the value (and a subnormal half step of the scale).

    The interpreter cuts off instead of rounding, and loses the carry of values that round up to a power of two: a
    whole step is allowed there, and the latter wait for a GPU.
    """
    values = stored.double() * scale.double()
    allowed = (want.abs() * 2**-4).clamp(min=2.0**-10 * scale.double())
    error = (values - want).abs() / allowed
    if not HAS_GPU:
        mantissa = torch.frexp((want / scale.double()).abs())[0]
        error = error[mantissa < 0.93] / 2
    return float(error.max())


@pytest.mark.parametrize("path", paths("rms_norm"))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize(("rows", "hidden"), SIZES)
def test_rms_norm(rows, hidden, with_residual, dtype, path, device):
    x = normal(rows, hidden, dtype=dtype, device=device, seed=1)
    weight = normal(hidden, dtype=dtype, device=device, seed=2)
    residual = normal(rows, hidden, dtype=dtype, device=device, seed=3) if with_residual else None
    total = x if residual is None else x + residual
    values = total.double()
    want = values / (values.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    with dispatch.override("rms_norm", path):
        out, summed = rms_norm(x, weight, eps=1e-5, residual=residual)
        stored, scale, summed8 = rms_norm_fp8(x, weight, eps=1e-5, residual=residual)
    assert torch.equal(summed, total)
    assert torch.equal(summed8, total)
    assert relative_error(out, want) <= RELATIVE_ERROR[dtype]
    assert fp8_error(stored, scale, want) <= 1.01
    assert torch.allclose(scale.double(), want.abs().amax(-1, keepdim=True) / 448, rtol=1e-4)


@pytest.mark.parametrize("path", paths("swiglu"))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "inter"), [*SIZES, (2, 1536)])
def test_swiglu(rows, inter, dtype, path, device):
    gate_up = normal(rows, 2 * inter, dtype=dtype, device=device, seed=1)
    gate, up = gate_up.double().chunk(2, -1)
    want = gate * gate.sigmoid() * up
    with dispatch.override("swiglu", path):
        out = swiglu(gate_up)
        stored, scale = swiglu_fp8(gate_up)
    assert relative_error(out, want) <= RELATIVE_ERROR[dtype]
    assert fp8_error(stored, scale, want) <= 1.01


@pytest.mark.parametrize("path", paths("gated_mlp"))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("rows", "hidden", "inter"), [(1, 64, 48), (3, 77, 33), (130, 576, 1536)])
def test_gated_mlp(rows, hidden, inter, biased, dtype, path, device):
    def weight(*shape: int, seed: int) -> torch.Tensor:
        return normal(*shape, dtype=torch.float32, device=device, seed=seed).div(shape[-1] ** 0.5).to(dtype)

    x, residual = (normal(rows, hidden, dtype=dtype, device=device, seed=s) for s in (1, 2))
    gate_up, down = weight(2 * inter, hidden, seed=3), weight(hidden, inter, seed=4)
    biases = (weight(2 * inter, seed=5), weight(hidden, seed=6)) if biased else (None, None)
    with dispatch.override("gated_mlp", path):
        out = gated_mlp(x, gate_up, down, residual=residual, gate_up_bias=biases[0], down_bias=biases[1])
    wide = [bias.double() if bias is not None else 0 for bias in biases]
    gate, up = (x.double() @ gate_up.double().T + wide[0]).chunk(2, -1)
    want = residual.double() + (gate * gate.sigmoid() * up) @ down.double().T + wide[1]
    assert out.dtype == dtype
    assert relative_error(out, want) <= RELATIVE_ERROR[dtype]


def test_rows_of_zeros_have_scale_one(device):
    for path in paths("swiglu"):
        with dispatch.override("swiglu", path):
            stored, scale = swiglu_fp8(torch.zeros(3, 128, device=device))
        assert (stored.float() == 0).all()
        assert (scale == 1).all()


@pytest.mark.parametrize("path", paths("rope"))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("tokens", "heads", "head_dim", "pairs"), [(1, 1, 64, 32), (7, 9, 64, 16), (3, 32, 128, 64)])
def test_rope(tokens, heads, head_dim, pairs, interleaved, dtype, path, device):
    x = normal(tokens, heads + 2, head_dim, dtype=dtype, device=device, seed=1)
    before = x.clone()
    positions = torch.arange(tokens, device=device) + 500_000
    angles = positions[:, None].double() / 8e6 ** (torch.arange(pairs, device=device) / pairs)
    with dispatch.override("rope", path):
        rope(x[:, 1:-1], angles.cos().float(), angles.sin().float(), interleaved=interleaved)
    head = before[:, 1:-1].double()
    turned = head[..., : 2 * pairs]
    a, b = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    rotated = (a * cos - b * sin, b * cos + a * sin)
    want = torch.stack(rotated, -1).flatten(-2) if interleaved else torch.cat(rotated, -1)
    assert relative_error(x[:, 1:-1, : 2 * pairs], want) <= RELATIVE_ERROR[dtype]
    assert torch.equal(x[:, 1:-1, 2 * pairs :], before[:, 1:-1, 2 * pairs :])
    assert torch.equal(x[:, [0, -1]], before[:, [0, -1]])


@pytest.mark.parametrize("path", paths("kv_quant"))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kept", STORED_DTYPES, ids=str)
@pytest.mark.parametrize(("kv_heads", "tokens", "head_dim"), [(1, 1, 64), (3, 129, 64), (2, 300, 128), (1, 128, 96)])
def test_kv_quantisation(kv_heads, tokens, head_dim, kept, dtype, path, device):
    x = normal(tokens, kv_heads, head_dim, dtype=dtype, device=device, seed=1).transpose(0, 1)
    with dispatch.override("kv_quant", path):
        stored, scales = quantise_kv(x, dtype=kept)
        room = torch.full((kv_heads, tokens + 9, head_dim), 7.0, dtype=dtype, device=device)
        back = dequantise_kv(stored, scales, dtype=dtype, out=room[:, 4 : 4 + tokens])
    per_token = scales.repeat_interleave(128, 1)[:, :tokens, None]
    if kept == torch.int8:
        error = (stored.double() * per_token.double() - x.double()).abs() / per_token.double()
        assert error.max() <= 0.501, "half a step"
    else:
        assert fp8_error(stored, per_token, x.double()) <= 1.01
    assert stored.dtype == kept
    tiles = torch.nn.functional.pad(x.double(), (0, 0, 0, -tokens % 128)).unflatten(1, (-1, 128))
    assert torch.allclose(scales.double(), tiles.abs().amax((2, 3)) / LARGEST[kept], rtol=1e-6)
    assert torch.equal(back, (stored.float() * per_token).to(dtype))
    rounded = torch.full_like(room, 7.0)
    with dispatch.override("kv_quant", path):
        quantise_kv(x, dtype=kept, rounded=rounded[:, 4 : 4 + tokens])
    assert torch.equal(rounded, room)
    assert (room[:, :4] == 7).all()
    assert (room[:, 4 + tokens :] == 7).all()


@pytest.mark.parametrize("path", paths("kv_quant"))
def test_int8_rounds_halves_up_and_keeps_its_ends(path, device):
    x = torch.zeros(1, 5, 64, device=device)
    x[0, :, 0] = torch.tensor([127.0, 2.5, -2.5, -127.0, 0.49], device=device)
    with dispatch.override("kv_quant", path):
        stored, scales = quantise_kv(x, dtype=torch.int8)
        nothing, one = quantise_kv(torch.zeros_like(x), dtype=torch.int8)
    assert scales.tolist() == [[1.0]]
    assert stored[0, :, 0].tolist() == [127, 3, -2, -127, 0]
    assert (nothing == 0).all()
    assert one.tolist() == [[1.0]]


def test_wrong_arguments():
    x, w = torch.zeros(3, 64), torch.ones(64)
    with pytest.raises(ValueError, match=r"weight: expected shape \[64\], got \[32\]"):
        rms_norm(x, w[:32])
    with pytest.raises(ValueError, match=r"residual: expected dtype torch.float32, got torch.float16"):
        rms_norm(x, w, residual=x.half())
    with pytest.raises(ValueError, match=r"x: expected a dense tensor"):
        rms_norm(torch.zeros(64, 3).T, w)
    with pytest.raises(ValueError, match=r"gate_up: expected an even last dimension, got \[3, 7\]"):
        swiglu(torch.zeros(3, 7))
    with pytest.raises(ValueError, match=r"down: expected shape \[64, 16\], got \[64, 32\]"):
        gated_mlp(x, torch.zeros(32, 64), torch.zeros(64, 32), residual=x)
    with pytest.raises(ValueError, match=r"cos: expected 1 to 32 pairs for head_dim 64, got 33"):
        rope(torch.zeros(2, 1, 64), torch.zeros(2, 33), torch.zeros(2, 33))
    with pytest.raises(ValueError, match=r"cos: expected dtype torch.float32"):
        rope(torch.zeros(2, 1, 64), torch.zeros(2, 8).bfloat16(), torch.zeros(2, 8).bfloat16())
    with pytest.raises(ValueError, match=r"x: expected shape \[kv_heads, tokens, head_dim\]"):
        quantise_kv(x)
    with pytest.raises(ValueError, match=r"scales: expected shape \[1, 2\], got \[1, 1\]"):
        dequantise_kv(torch.zeros(1, 129, 64).to(torch.float8_e4m3fn), torch.ones(1, 1), dtype=torch.float32)
