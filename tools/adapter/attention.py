"""Attention of packed training rows and of evaluation with a shared document."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

# cuDNN's causal kernel is about twice as fast as FlashAttention-2 on Hopper, backward included.
_CAUSAL = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
_SPLIT = 512


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of `[rows, heads, head_dim]`; k and v may have fewer heads."""
    with sdpa_kernel(_CAUSAL, set_priority=True):
        out = F.scaled_dot_product_attention(*(t[None] for t in _heads_first(q, k, v)), is_causal=True)
    return out[0].transpose(0, 1)


def masked(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """Attention with an additive bias `[rows, keys]`.

    Written out: with few rows and many keys the memory-efficient kernel's backward runs on one block a head, which
    cost more than all the rest of a step.
    """
    q, k, v = _heads_first(q, k, v)
    scores = torch.baddbmm(bias, q, k.transpose(1, 2), alpha=q.shape[-1] ** -0.5)
    return torch.bmm(scores.softmax(-1), v).transpose(0, 1)


def _heads_first(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    return q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)


class PackedAttention:
    """Rows in three parts: a document, questions that see it but not each other, and chat replays that see neither.

    `question_bias` is `[questions, document + questions]`, `replay_bias` `[replays, replays]`.
    """

    def __init__(self, document_rows: int, question_bias: Tensor, replay_bias: Tensor) -> None:
        self.document_rows = document_rows
        self.end = document_rows + question_bias.shape[0]
        self.question_bias, self.replay_bias = question_bias, replay_bias

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        d, e = self.document_rows, self.end
        document = causal(q[:d], k[:d], v[:d])
        questions = masked(q[d:e], k[:e], v[:e], self.question_bias)
        replays = masked(q[e:], k[e:], v[e:], self.replay_bias)
        return torch.cat([document, questions, replays])


def segment_bias(segments: Tensor, dtype: torch.dtype) -> Tensor:
    """`[rows, rows]`: 0 where a row sees an earlier or equal row of its own segment, else -inf."""
    index = torch.arange(len(segments), device=segments.device)
    allowed = (segments[:, None] == segments) & (index[:, None] >= index)
    return torch.zeros(allowed.shape, device=segments.device, dtype=dtype).masked_fill_(~allowed, float("-inf"))


def question_bias(document_rows: int, document_tokens: int, segments: Tensor, dtype: torch.dtype) -> Tensor:
    """`[rows, document_rows + rows]`: the document's real tokens, then the row's own segment."""
    document = torch.zeros(len(segments), document_rows, device=segments.device, dtype=dtype)
    document[:, document_tokens:] = float("-inf")
    return torch.cat([document, segment_bias(segments, dtype)], dim=1)


class SharedDocument:
    """KV of one prefilled document, and of several questions that each continue it on their own.

    Document keys and values are `[kv_heads, tokens, head_dim]` a layer; questions' are `[questions, capacity, …]`.
    """

    def __init__(self) -> None:
        self.document: list[tuple[Tensor, Tensor]] = []
        self.own: list[tuple[Tensor, Tensor]] = []
        self.questions = self.capacity = 0
        self.slots = torch.empty(0)
        self.visible = torch.empty(0)

    def prefill(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.document.append((k.transpose(0, 1), v.transpose(0, 1)))
        return causal(q, k, v)

    def begin(self, questions: int, capacity: int) -> None:
        """Forget earlier questions and make room for `capacity` tokens of each new one."""
        self.questions, self.capacity = questions, capacity
        kv_heads, _, head_dim = self.document[0][0].shape
        self.own = [
            (k.new_zeros(questions, capacity, kv_heads, head_dim), k.new_zeros(questions, capacity, kv_heads, head_dim))
            for k, _ in self.document
        ]

    def see(self, slots: Tensor) -> None:
        """The next rows, `[questions, rows]`, are written to these slots and see their own slots up to each."""
        self.slots = slots
        self.visible = torch.arange(self.capacity, device=slots.device) <= slots[..., None]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q `[questions * rows, heads, head_dim]`; exact softmax in float32 over the document and the own tokens."""
        n, rows = self.slots.shape
        heads, head_dim = q.shape[1:]
        kv_heads = k.shape[1]
        group = heads // kv_heads
        own_k, own_v = self.own[layer]
        which = torch.arange(n, device=q.device)[:, None]
        own_k[which, self.slots] = k.view(n, rows, kv_heads, head_dim)
        own_v[which, self.slots] = v.view(n, rows, kv_heads, head_dim)

        query = q.float().view(n, rows, kv_heads, group, head_dim) * head_dim**-0.5
        doc_k, doc_v = self.document[layer]
        flat = query.permute(2, 0, 1, 3, 4).reshape(kv_heads, -1, head_dim)
        doc_scores = torch.bmm(flat, doc_k.float().transpose(1, 2))
        own_scores = torch.einsum("nrhgd,nchd->hnrgc", query, own_k.float())
        own_scores.masked_fill_(~self.visible[None, :, :, None], float("-inf"))
        own_scores = own_scores.reshape(kv_heads, -1, self.capacity)
        peak = torch.maximum(doc_scores.amax(-1), own_scores.amax(-1))[..., None]
        doc_p, own_p = doc_scores.sub_(peak).exp_(), own_scores.sub_(peak).exp_()
        total = doc_p.sum(-1, keepdim=True) + own_p.sum(-1, keepdim=True)
        out = _split_sum(doc_p, doc_v.float())
        own_out = torch.einsum("hnrgc,nchd->hnrgd", own_p.view(kv_heads, n, rows, group, -1), own_v.float()).reshape(
            out.shape
        )
        out = ((out + own_out) / total).view(kv_heads, n, rows, group, head_dim)
        return out.permute(1, 2, 0, 3, 4).reshape(n * rows, heads, head_dim).to(q.dtype)


def _split_sum(p: Tensor, v: Tensor) -> Tensor:
    """`p @ v` `[heads, rows, head_dim]` over very many keys: partial sums of 512 keys each keep the whole GPU busy."""
    heads, whole = p.shape[0], p.shape[2] // _SPLIT * _SPLIT
    parts = p[..., :whole].unflatten(-1, (-1, _SPLIT)).transpose(1, 2)
    summed = torch.matmul(parts, v[:, :whole].reshape(heads, -1, _SPLIT, v.shape[-1])).sum(1)
    return summed + torch.bmm(p[..., whole:], v[:, whole:])
