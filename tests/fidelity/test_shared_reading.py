"""Questions answered in a batch give what the engine's own answers give, and likelihoods are transformers'."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from tiny_models import random_tokens

from engine.interfaces import AnswerRequest, SamplingParams
from loadtests.fidelity.reading import Reading
from loadtests.fidelity.variants import SALT, Engines, Variant

PREFIX = random_tokens(700)
QUESTIONS = [random_tokens(length, seed=length) for length in (5, 19, 1)]
REPLIES = [random_tokens(length, seed=100 + length) for length in (1, 30, 12)]
DENSE = Variant.named("exact")


def ask(engines: Engines, **how: Any) -> tuple[list[list[int]], list[float]]:
    engines.prefill(DENSE, PREFIX, holder="document")
    with Reading.open(engines.of(DENSE), PREFIX, salt=SALT, fidelity="exact") as reading:
        return reading.ask(QUESTIONS, replies=REPLIES, **how)


def engines_own(engines: Engines, question: np.ndarray, count: int) -> list[int]:
    request = AnswerRequest(PREFIX, question, SALT, SamplingParams(max_tokens=count), "exact")
    answer = engines.of(DENSE).start_answer(request)
    tokens: list[int] = []
    while True:
        delta = answer.step()
        tokens += delta.token_ids
        if delta.finish_reason is not None:
            return tokens


def test_batch_answers_as_the_engine_does(engines: Engines) -> None:
    counts = [12, 25, 3]
    tokens, _ = ask(engines, max_new_tokens=counts)
    expected = [engines_own(engines, question, count) for question, count in zip(QUESTIONS, counts, strict=True)]
    assert tokens == expected
    assert max(map(len, tokens)) > 3


def test_likelihood_is_that_of_transformers(engines: Engines, tiny: tuple[Path, Any]) -> None:
    _, nlls = ask(engines, max_new_tokens=[1, 1, 1])
    for question, reply, nll in zip(QUESTIONS, REPLIES, nlls, strict=True):
        ids = torch.from_numpy(np.concatenate([PREFIX, question, reply]).astype(np.int64))
        with torch.no_grad():
            logits = tiny[1](ids[None]).logits[0, len(PREFIX) + len(question) - 1 : -1]
        expected = torch.nn.functional.cross_entropy(logits, ids[-len(reply) :])
        assert abs(nll - float(expected)) < 2e-3 * max(1.0, float(expected))


def test_a_reply_ends_as_soon_as_it_is_enough(engines: Engines) -> None:
    tokens, _ = ask(
        engines,
        max_new_tokens=[20, 20, 20],
        enough=lambda question, ids: question == 1 and len(ids) == 4,
    )
    assert len(tokens[1]) <= 4
    assert max(len(tokens[0]), len(tokens[2])) > 4
