import pytest
import torch

from loadtests.heads import generate, load_profile


def masses(q, k, rows):
    """Softmax mass of every key for the last rows of q: [heads, rows, tokens]."""
    tokens = k.shape[1]
    scores = q[-rows:].float().transpose(0, 1) @ k.float().repeat_interleave(4, 0).transpose(1, 2) / 128**0.5
    position = torch.arange(tokens - rows, tokens)
    return scores.masked_fill(torch.arange(tokens) > position[:, None], float("-inf")).softmax(-1)


def test_planted_structure_is_found_where_it_was_put():
    profile = load_profile("llama8b")
    q, k = generate(profile, 4096, rows=(3840, 4096), background=1e-3)
    assert q.shape == (256, 32, 128)
    assert k.shape == (8, 4096, 128)
    mass = masses(q, k, 64)
    assert float(mass[..., :4].sum(-1).mean()) > 0.05  # 4 of 4,096 keys
    # The keys just before the row against as many half-way back.
    assert float(mass[..., -128:-64].sum()) > 1.5 * float(mass[..., 2048:2112].sum())


def test_the_same_arguments_give_the_same_values():
    profile = load_profile("probe")
    first, second = generate(profile, 600, layer=3), generate(profile, 600, layer=3)
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])
    assert not torch.equal(first[1], generate(profile, 600, layer=4)[1])


def test_background_is_interpolated_between_calibrated_lengths():
    profile = load_profile("llama8b")
    assert profile.background_at(65_536) == profile.background[0][1]
    assert profile.background_at(100) == profile.background[0][1]
    assert profile.background_at(1 << 22) == profile.background[-1][1]
    assert profile.background[1][1] < profile.background_at(100_000) < profile.background[0][1]


def test_unknown_profile():
    with pytest.raises(ValueError, match="unknown heads profile 'gpt'; expected one of llama8b, probe"):
        load_profile("gpt")
