"""Answers on stored KV: warm equals cold, several at once, shared memory, limits."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import OpenEngine, prefill_request, random_tokens, run

from engine.answer import DenseAnswer
from engine.decode_pool import DecodePool, Decoding
from engine.engine import LocalEngine
from engine.errors import ContextTooLong, EngineError, InvalidRequest, KVMissing, OutOfMemory
from engine.interfaces import Answer, AnswerRequest, SamplingParams

PREFIX, QUESTION = random_tokens(5000, 1), random_tokens(30, 2)


def ask(prefix: int = 5000, question: int = 30, **sampling: object) -> AnswerRequest:
    params = SamplingParams(**{"max_tokens": 6, **sampling})  # type: ignore[arg-type]
    return AnswerRequest(PREFIX[:prefix], QUESTION[:question], b"salt", params)


def tokens_of(answer: Answer) -> list[int]:
    tokens: list[int] = []
    while True:
        delta = answer.step()
        tokens.extend(delta.token_ids)
        if delta.finish_reason:
            return tokens


@pytest.fixture
def engine(llama_folder: Path, engine_on: OpenEngine) -> LocalEngine:
    return engine_on(llama_folder)


@pytest.fixture
def warm(engine: LocalEngine) -> LocalEngine:
    run(engine.start_prefill(prefill_request(PREFIX)))
    return engine


def test_a_warm_answer_equals_the_one_without_a_prefix(warm: LocalEngine) -> None:
    answer = warm.start_answer(ask())
    assert tokens_of(answer) == tokens_of(
        warm.start_answer(
            AnswerRequest(PREFIX[:0], np.concatenate((PREFIX, QUESTION)), b"salt", SamplingParams(max_tokens=6))
        )
    )
    assert answer.kv_tier == "warm_disk"
    assert (answer.prompt_tokens, answer.completion_tokens) == (5030, 6)


def test_answers_interleave_and_share_the_prefix(warm: LocalEngine) -> None:
    alone = [tokens_of(warm.start_answer(ask(question=n))) for n in (30, 7)]
    answers = [warm.start_answer(ask(question=n)) for n in (30, 7)]
    assert answers[0]._prefix is answers[1]._prefix
    together: list[list[int]] = [[], []]
    for _ in range(6):
        for tokens, answer in zip(together, answers, strict=True):
            tokens.extend(answer.step().token_ids)
    assert together == alone
    assert warm._prefixes == {}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_answers_decode_in_one_pass_to_the_same_bits(
    dtype: str, llama_folder: Path, engine_on: OpenEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_on(llama_folder, dtype=dtype)
    run(engine.start_prefill(prefill_request(PREFIX)))
    seen: list[tuple[int, torch.Tensor]] = []
    passes = []
    forward_pass = DecodePool._forward

    def counted(self: DecodePool, batch: list[Decoding]) -> torch.Tensor:
        passes.append(len(batch))
        return forward_pass(self, batch)

    monkeypatch.setattr(DecodePool, "_forward", counted)
    kept = DenseAnswer.row_done

    def noted(self: DenseAnswer, logits: torch.Tensor) -> None:
        seen.append((self.prompt_tokens, logits.clone()))
        kept(self, logits)

    monkeypatch.setattr(DenseAnswer, "row_done", noted)
    lengths = (30, 7, 17)
    for length in lengths:
        tokens_of(engine.start_answer(ask(question=length)))
    alone, seen[:] = list(seen), []
    assert passes == [1] * 15

    passes.clear()
    answers = [engine.start_answer(ask(question=length)) for length in lengths]
    for _ in range(6):
        for answer in answers:
            answer.step()
    assert passes == [3] * 5
    for length in lengths:
        mine = [[logits for prompt, logits in rows if prompt == 5000 + length] for rows in (alone, seen)]
        assert len(mine[0]) == 5
        assert all(torch.equal(one, other) for one, other in zip(*mine, strict=True))


def test_one_that_leaves_is_not_computed_along(warm: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    stays, goes = warm.start_answer(ask(question=30)), warm.start_answer(ask(question=7))
    stays.step()
    goes.step()
    goes.close()
    alone = tokens_of(warm.start_answer(ask(question=30)))
    assert [alone[0], *tokens_of(stays)] == alone
    assert warm._pool._waiting == []


def test_closing_is_safe_at_any_time(warm: LocalEngine) -> None:
    answer = warm.start_answer(ask())
    answer.step()
    answer.close()
    answer.close()
    assert warm._prefixes == {}
    with pytest.raises(EngineError, match="ended"):
        answer.step()


def test_the_answer_ends_at_an_end_token_or_a_stop_string(warm: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm, "_decode", lambda ids: "".join(f"<{token}>" for token in ids))
    first, second, *_ = tokens_of(warm.start_answer(ask()))
    answer = warm.start_answer(ask(stop=(f"><{second}",)))
    deltas = [answer.step(), answer.step()]
    assert deltas[-1].finish_reason == "stop"
    assert "".join(delta.text for delta in deltas) == f"<{first}"

    monkeypatch.setattr("engine.sampling.Sampler.pick", lambda self, logits: 2)
    delta = warm.start_answer(ask()).step()
    assert (delta.text, delta.token_ids, delta.finish_reason) == ("", (), "stop")


def test_the_limit_counts_everything(engine: LocalEngine) -> None:
    engine.max_positions = 5035
    with pytest.raises(ContextTooLong, match="5036 tokens are more than the 5035"):
        engine.start_answer(ask())
    with pytest.raises(ContextTooLong):
        engine.start_prefill(prefill_request(random_tokens(5036)))


def test_what_is_not_stored_must_be_prefilled_first(engine: LocalEngine) -> None:
    with pytest.raises(KVMissing, match="prefill the prefix first"):
        engine.start_answer(ask())
    with pytest.raises(InvalidRequest, match="empty question"):
        engine.start_answer(ask(question=0))
    with pytest.raises(InvalidRequest, match="empty prefix"):
        engine.start_prefill(prefill_request(PREFIX[:0]))


def test_a_prefix_beyond_free_memory_is_refused_with_both_numbers(
    warm: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.prefix_kv.available_bytes", lambda: 260 << 20)
    with pytest.raises(OutOfMemory) as caught:
        warm.start_answer(ask())
    assert caught.value.needed_bytes == 5000 * 3 * 2 * 2 * 64 * 4
    assert caught.value.available_bytes == 4 << 20
    assert warm._prefixes == {}


def test_an_answer_that_cannot_start_lets_go_of_the_prefix(warm: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: object) -> None:
        raise RuntimeError("can't allocate memory")

    monkeypatch.setattr("engine.answer.Sampler", no_memory)
    with pytest.raises(RuntimeError, match="allocate"):
        warm.start_answer(ask())
    assert warm._prefixes == {}
    assert warm.store.release("document") > 0  # nothing leases it


def corrupt(folder: Path) -> None:
    for file in folder.rglob("*"):
        if file.is_file() and file.stat().st_size > 1 << 20 and b"SQLite" not in file.read_bytes()[:16]:
            data = bytearray(file.read_bytes())
            data[-5000] ^= 1
            file.write_bytes(data)


def test_lost_kv_is_not_shared_with_later_answers(warm: LocalEngine, tmp_path: Path) -> None:
    expected = tokens_of(warm.start_answer(ask()))
    first, second = warm.start_answer(ask()), warm.start_answer(ask())
    corrupt(tmp_path / "kv")
    with pytest.raises(KVMissing):
        first.step()
    run(warm.start_prefill(prefill_request(PREFIX, owner="again")))
    assert tokens_of(warm.start_answer(ask())) == expected  # while the second still holds what was lost
    with pytest.raises(KVMissing):
        second.step()
    assert warm._prefixes == {}


def test_corrupt_kv_is_never_served(warm: LocalEngine, tmp_path: Path) -> None:
    expected = tokens_of(warm.start_answer(ask()))
    corrupt(tmp_path / "kv")
    with pytest.raises(KVMissing):
        tokens_of(warm.start_answer(ask()))
    result = run(warm.start_prefill(prefill_request(PREFIX, owner="again"))).result
    assert result.cached_tokens < len(PREFIX)
    assert tokens_of(warm.start_answer(ask())) == expected


def test_quantised_kv_changes_an_answer_little_and_is_kept_apart(llama_folder: Path, engine_on: OpenEngine) -> None:
    """INT8's 255 steps are finer than FP8's where values are of a size, as in K and V of 128 tokens they are."""
    logits: dict[str, torch.Tensor] = {}
    digests = set[str]()
    for kv_dtype in ("float32", "float8", "int8"):
        engine = engine_on(llama_folder, kv_dtype=kv_dtype)
        assert engine.cached_tokens(PREFIX, salt=b"salt", fidelity="default") == 0
        run(engine.start_prefill(prefill_request(PREFIX, owner=kv_dtype)))
        digests.add(engine.digest("default"))
        answer = engine.start_answer(ask())
        with torch.inference_mode():
            logits[kv_dtype] = answer._logits()
        answer.close()
    assert len(digests) == 3
    error = {name: float((logits[name] - logits["float32"]).norm() / logits["float32"].norm()) for name in logits}
    assert 0 < error["int8"] < error["float8"] < 0.2
