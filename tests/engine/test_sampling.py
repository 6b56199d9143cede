"""From logits to tokens."""

import pytest
import torch

from engine.errors import InvalidRequest
from engine.interfaces import SamplingParams
from engine.sampling import Sampler, check_sampling

LOGITS = torch.tensor([1.0, 3.0, 2.0, -1.0])


def test_zero_temperature_is_greedy() -> None:
    assert Sampler(SamplingParams()).pick(LOGITS) == 1


def test_a_seed_repeats_and_seeds_differ() -> None:
    def draw(seed: int) -> list[int]:
        sampler = Sampler(SamplingParams(temperature=2.0, seed=seed))
        return [sampler.pick(LOGITS) for _ in range(40)]

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


@pytest.mark.parametrize(
    ("params", "allowed"),
    [
        (SamplingParams(temperature=5.0, top_k=2, seed=0), {1, 2}),
        (SamplingParams(temperature=1.0, top_p=0.6, seed=0), {1}),
        (SamplingParams(temperature=1.0, top_p=0.8, seed=0), {1, 2}),
        (SamplingParams(temperature=9.0, seed=0), {0, 1, 2, 3}),
    ],
)
def test_top_k_and_top_p_bound_the_choice(params: SamplingParams, allowed: set[int]) -> None:
    sampler = Sampler(params)
    assert {sampler.pick(LOGITS) for _ in range(300)} == allowed


def test_frequencies_follow_the_softmax() -> None:
    sampler = Sampler(SamplingParams(temperature=1.0, seed=3))
    counts = torch.bincount(torch.tensor([sampler.pick(LOGITS) for _ in range(4000)]), minlength=4)
    torch.testing.assert_close(counts / 4000, LOGITS.softmax(0), atol=0.03, rtol=0)


def test_the_repetition_penalty_moves_away_from_generated_tokens() -> None:
    sampler = Sampler(SamplingParams(repetition_penalty=2.0))
    assert [sampler.pick(LOGITS) for _ in range(3)] == [1, 2, 1]
    assert Sampler(SamplingParams(repetition_penalty=2.0)).pick(-LOGITS) == 3


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -0.1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_k": -1},
        {"repetition_penalty": 0.0},
        {"max_tokens": 0},
        {"stop": ("",)},
    ],
)
def test_impossible_parameters_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(InvalidRequest, match=next(iter(wrong))):
        check_sampling(SamplingParams(**wrong))  # type: ignore[arg-type]
