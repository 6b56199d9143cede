"""Rotary frequencies, always float32: rounded to bfloat16 they ruin positions beyond a few thousand."""

import math

import torch

from engine.spec import RopeSpec


def frequencies(rope: RopeSpec, rotary_dim: int, device: torch.device) -> tuple[torch.Tensor, float]:
    """Inverse frequencies [rotary_dim / 2] float32 and the factor on cos and sin, as transformers defines them."""
    channels = torch.arange(0, rotary_dim, 2, dtype=torch.int64, device=device).float()
    inverse = 1.0 / (rope.theta ** (channels / rotary_dim))
    if rope.kind == "linear":
        return inverse / rope.factor, 1.0
    if rope.kind == "llama3":
        return _llama3(rope, inverse), 1.0
    if rope.kind == "yarn":
        factor = rope.attention_factor
        if factor is None:
            factor = 0.1 * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0
        return _yarn(rope, rotary_dim, inverse), factor
    if rope.kind == "longrope":
        factors = torch.tensor(rope.long_factors, device=device)
        return 1.0 / (factors * rope.theta ** (channels / rotary_dim)), _longrope_factor(rope)
    return inverse, 1.0


def _longrope_factor(rope: RopeSpec) -> float:
    """LongRoPE (Ding et al. 2024): what cos and sin are multiplied by."""
    if rope.attention_factor is not None:
        return rope.attention_factor
    return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_positions)) if rope.factor > 1 else 1.0


def _llama3(rope: RopeSpec, inverse: torch.Tensor) -> torch.Tensor:
    """Llama 3.1: long wavelengths are stretched, short ones kept, those between interpolated."""
    wavelength = 2 * math.pi / inverse
    stretched = inverse / rope.factor
    span = rope.high_freq_factor - rope.low_freq_factor
    smooth = (rope.original_positions / wavelength - rope.low_freq_factor) / span
    between = (1 - smooth) * stretched + smooth * inverse
    long = wavelength > rope.original_positions / rope.low_freq_factor
    short = wavelength < rope.original_positions / rope.high_freq_factor
    return torch.where(long, stretched, torch.where(short, inverse, between))


def _yarn(rope: RopeSpec, head_dim: int, inverse: torch.Tensor) -> torch.Tensor:
    """YaRN (Peng et al. 2023): channels that turn often are kept, those that turn seldom are stretched."""

    def channel(rotations: float) -> float:
        return head_dim * math.log(rope.original_positions / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = channel(rope.beta_fast), channel(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32, device=inverse.device) - low) / (high - low)).clamp(0, 1)
    return inverse / rope.factor * ramp + inverse * (1 - ramp)
