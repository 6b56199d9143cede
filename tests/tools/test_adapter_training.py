"""The adapter's training rows and attention, without a model: a byte codec and random tensors."""

import random

import pytest
import torch
import torch.nn.functional as F

from loadtests.fidelity.filler import Filler, prose
from tools.adapter.attention import PackedAttention, SharedDocument, causal, masked, question_bias, segment_bias
from tools.adapter.prompts import Replay
from tools.adapter.replays import pack_replays
from tools.adapter.windows import MAX_POSITION, Exchange, make_window, pack, skip_wise


class ByteCodec:
    """One token a byte, offset by 3; token 2 stops."""

    stop_id = 2

    def encode(self, text: str) -> list[int]:
        return [3 + byte for byte in text.encode()]

    def count(self, text: str) -> int:
        return len(text.encode())

    def decode(self, ids: list[int]) -> str:
        return bytes(token - 3 for token in ids if token > 2).decode()


def expanded(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Plain attention in float64 under a boolean mask `[rows, keys]`."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1).double(), v.repeat_interleave(group, 1).double()
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * q.shape[-1] ** -0.5
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~mask, float("-inf")).softmax(-1), v)


def qkv(rows: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(rows, heads, 8, generator=generator) for heads in (6, 2, 2))


def test_skip_wise_positions_rise_and_stay_in_range() -> None:
    rng = random.Random(0)
    longest = 0
    for _ in range(200):
        positions = skip_wise(500, rng)
        assert positions[0] == 0
        assert (positions[1:] > positions[:-1]).all()
        longest = max(longest, int(positions[-1]))
    assert 100_000 < longest < MAX_POSITION


def test_packed_question_rows_predict_the_reply_and_follow_the_document() -> None:
    exchanges = [Exchange("What?", "It is", "blue."), Exchange("Why?", "", "So.")]
    window = pack("x", "text", exchanges, random.Random(1), ByteCodec(), document_rows=256, question_rows=200)
    codec = ByteCodec()
    for i, reply in enumerate((" blue.<|im_end|>", "So.<|im_end|>")):
        rows = [256 + int(row) for row in (window.segments == i).nonzero()[0]]
        scored = [row for row in rows if window.weights[row] > 0]
        assert codec.decode([int(window.targets[row]) for row in scored]) == reply
        assert [int(window.ids[row + 1]) for row in scored] == [int(window.targets[row]) for row in scored]
        assert int(window.positions[rows[0]]) == int(window.positions[window.document_tokens - 1]) + 1
    assert not window.weights[:256].any()


def test_questions_that_do_not_fit_are_left_out_whole() -> None:
    exchanges = [Exchange("Q" * 150, "", "a"), Exchange("q", "", "b")]
    window = pack("x", "text", exchanges, random.Random(1), ByteCodec(), document_rows=256, question_rows=100)
    assert set(window.segments.tolist()) == {-1, 1}


def test_every_task_makes_windows_that_fit() -> None:
    rng = random.Random(3)
    source = "\n\n".join(f"def name_{i}(first, second_{i}):\n    return first + second_{i} * {i}" for i in range(400))
    filler = Filler(["\n\n".join(prose(rng) for _ in range(200)), source])
    tasks = set()
    for _ in range(60):
        window = make_window(rng, ByteCodec(), filler, document_rows=16_000, question_rows=1500)
        assert 0 < window.document_tokens <= 16_000
        assert window.weights.any()
        tasks.add(window.task)
    assert len(tasks) >= 10


def test_replays_are_separate_segments_from_position_zero() -> None:
    replays = [Replay([10, 11], [12, 2]), Replay([20], [21, 22, 2])]
    window = pack_replays(replays, ByteCodec(), None, 400)
    assert set(window.segments.tolist()) == {-1, 0, 1}
    for i, replay in enumerate(replays):
        rows = (window.segments == i).nonzero()[0]
        assert window.positions[rows].tolist() == list(range(len(rows)))
        assert window.targets[rows][window.weights[rows] > 0].tolist() == replay.reply


@pytest.mark.parametrize("document_tokens", [12, 9])
def test_packed_attention_equals_one_masked_attention(document_tokens: int) -> None:
    segments = torch.tensor([0, 0, 1, 1, 1, -1])
    replays = torch.tensor([0, 0, 1])
    bias = question_bias(12, document_tokens, segments, torch.float32)
    attention = PackedAttention(12, bias, segment_bias(replays, torch.float32))
    q, k, v = qkv(21)
    mask = torch.zeros(21, 21, dtype=torch.bool)
    mask[:12, :12] = torch.ones(12, 12, dtype=torch.bool).tril()
    mask[12:18, :document_tokens] = True
    for start, group in ((12, segments), (18, replays)):
        n = len(group)
        same = (group[:, None] == group) & torch.ones(n, n, dtype=torch.bool).tril()
        mask[start : start + n, start : start + n] = same
    torch.testing.assert_close(attention(0, q, k, v).double(), expanded(q, k, v, mask), atol=1e-5, rtol=1e-5)


def test_masked_attention_has_sdpas_gradients() -> None:
    q, k, v = (tensor.requires_grad_() for tensor in qkv(7))
    bias = segment_bias(torch.tensor([0, 0, 0, 1, 1, 2, 2]), torch.float32)
    ours = torch.autograd.grad(masked(q, k, v, bias).square().sum(), (q, k, v))
    heads_first = (q.transpose(0, 1), *(t.repeat_interleave(3, 1).transpose(0, 1) for t in (k, v)))
    theirs = F.scaled_dot_product_attention(*heads_first, attn_mask=bias)
    for a, b in zip(ours, torch.autograd.grad(theirs.square().sum(), (q, k, v)), strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("document", [5, 1100])
def test_questions_over_a_shared_document_equal_each_alone(document: int) -> None:
    """Two questions of 3 and 2 tokens (the second padded), then one more token of each: past and within one split."""
    lengths, capacity = torch.tensor([3, 2]), 4
    doc_q, doc_k, doc_v = qkv(document)
    shared = SharedDocument()
    shared.prefill(0, doc_q, doc_k, doc_v)
    shared.begin(2, capacity)
    rows = [qkv(4, seed=1), qkv(4, seed=2)]

    shared.see(torch.arange(3).expand(2, -1))
    first = shared.attend(0, *(torch.cat([a[:3], b[:3]]) for a, b in zip(*rows, strict=True))).view(2, 3, 6, 8)
    shared.see(lengths[:, None])
    second = shared.attend(0, *(torch.stack([a[3], b[3]]) for a, b in zip(*rows, strict=True)))

    for i, length in enumerate(lengths.tolist()):
        own = [torch.cat([part[:length], part[3:]]) for part in rows[i]]
        whole = causal(*(torch.cat(parts) for parts in zip((doc_q, doc_k, doc_v), own, strict=True)))
        torch.testing.assert_close(first[i, :length], whole[document : document + length], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(second[i], whole[-1], atol=1e-4, rtol=1e-4)
