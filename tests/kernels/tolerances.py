"""One table of tolerances: ‖out − ref64‖ / ‖ref64‖ by dtype, inputs rounded to that dtype before the reference."""

import torch

RELATIVE_ERROR = {
    torch.float32: 1e-5,  # full-precision products; only the order of sums differs
    torch.float16: 1.5e-3,  # the softmax weights and the output are rounded to 11 bits
    torch.bfloat16: 5e-3,  # the same with 8 bits: half a unit in the last place is 2e-3
}
LSE_ERROR = {
    torch.float32: 1e-4,  # absolute, natural logarithm
    torch.float16: 2e-3,  # products of rounded inputs are exact in float32: sums and exp2's approximation remain
    torch.bfloat16: 2e-3,
}


def relative_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    """NaN anywhere gives NaN, which compares false with every tolerance."""
    out, reference = out.double(), reference.double()
    norm = reference.norm()
    return float((out - reference).norm() / norm) if norm > 0 else float((out - reference).norm())


def lse_error(lse: torch.Tensor, reference: torch.Tensor) -> float:
    """Largest difference; the infinities must sit in the same places."""
    if not torch.equal(lse.isneginf(), reference.isneginf()):
        return float("nan")
    finite = ~reference.isneginf()
    return float((lse.double() - reference.double())[finite].abs().max()) if finite.any() else 0.0
