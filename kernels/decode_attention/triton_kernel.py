"""Decode attention in Triton: split over the keys (flash-decoding), each split's result merged by its LSE."""

import torch
import triton
import triton.language as tl

from kernels.dispatch import capability
from kernels.launch import lacks_fp8, precision, shared_memory_bytes

LOG2_E = 1.4426950408889634
_PROGRAMS_PER_MULTIPROCESSOR = 8


@triton.jit
def _page(
    q, q_scale, acc, m, total, page, held, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, stride_kp, stride_kt, stride_vp,
    stride_vt, k_scale_at, v_scale_at, stride_ksp, stride_vsp,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr, MASKED: tl.constexpr, QUANTISED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax: the first `held` keys of one page."""
    key = tl.arange(0, PAGE)
    channels = tl.arange(0, BLOCK_D)
    k_at = k_ptr + page * stride_kp + key[:, None] * stride_kt + channels[None, :]
    v_at = v_ptr + page * stride_vp + key[:, None] * stride_vt + channels[None, :]
    mask = (key < held)[:, None] & (channels < HEAD_DIM)[None, :]
    PADDED: tl.constexpr = MASKED or BLOCK_D != HEAD_DIM
    k = tl.load(k_at, mask=mask, other=0.0) if PADDED else tl.load(k_at)
    scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision=PRECISION)
    score_scale = q_scale
    if QUANTISED:
        score_scale = q_scale * tl.load(k_scales_ptr + page * stride_ksp + k_scale_at)
    scores *= score_scale[:, None]
    if MASKED:
        scores = tl.where((key < held)[None, :], scores, float("-inf"))
    m_new = tl.maximum(m, tl.max(scores, 1))
    weights = tl.exp2(scores - m_new[:, None])
    alpha = tl.exp2(m - m_new)
    total = total * alpha + tl.sum(weights, 1)
    v = tl.load(v_at, mask=mask, other=0.0) if PADDED else tl.load(v_at)
    if QUANTISED:
        v_scale = tl.load(v_scales_ptr + page * stride_vsp + v_scale_at)
        acc = acc * alpha[:, None] + tl.dot(weights.to(q.dtype), v.to(q.dtype), input_precision=PRECISION) * v_scale
    else:
        acc = tl.dot(weights.to(q.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
    return acc, m_new, total


@triton.jit
def split_kernel(
    q_ptr, k_ptr, v_ptr, table_ptr, lengths_ptr, k_scales_ptr, v_scales_ptr, acc_ptr, m_ptr, total_ptr,
    stride_qb, stride_qh, stride_kp, stride_kh, stride_kt, stride_vp, stride_vh, stride_vt, stride_tb,
    stride_ksp, stride_ksh, stride_vsp, stride_vsh, splits, qk_scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr, QUANTISED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One entry, KV head and split: unnormalised acc [ROWS, BLOCK_D], its maximum (base 2) and its sum."""
    split = tl.program_id(0)
    entry = (tl.program_id(1) // KV_HEADS).to(tl.int64)
    kv_head = (tl.program_id(1) % KV_HEADS).to(tl.int64)
    length = tl.load(lengths_ptr + entry)
    # Every entry's own pages are dealt evenly to its splits: unequal documents in a batch balance themselves.
    pages = tl.cdiv(length, PAGE)
    per_split = tl.cdiv(pages, splits)
    first = split * per_split
    last = tl.minimum(first + per_split, pages)
    row = tl.arange(0, ROWS)
    channels = tl.arange(0, BLOCK_D)
    inside = channels < HEAD_DIM
    head = kv_head * GROUP + row
    q_at = q_ptr + entry * stride_qb + head[:, None] * stride_qh + channels[None, :]
    q = tl.load(q_at, mask=(row < GROUP)[:, None] & inside[None, :], other=0.0)
    q_scale = tl.full([ROWS], 1.0, tl.float32) * qk_scale
    if QUANTISED:
        # float8_e4m3fn turns into float16 exactly and in one instruction (bfloat16 takes two more), int8 exactly;
        # q, scaled to 1 so that it can't overflow, loses nothing either: float16 has three more bits than bfloat16.
        largest = tl.maximum(tl.max(tl.abs(q.to(tl.float32)), 1), 1.0e-30)
        q_scale *= largest
        q = (q.to(tl.float32) / largest[:, None]).to(tl.float16)
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    m = tl.full([ROWS], -1.0e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    # All pages but the entry's last are full: they need no mask.
    full = tl.maximum(first, tl.minimum(last, length // PAGE))
    for index in tl.range(first, full):
        page = tl.load(table_ptr + entry * stride_tb + index).to(tl.int64)
        acc, m, total = _page(
            q, q_scale, acc, m, total, page, PAGE, k_ptr + kv_head * stride_kh, v_ptr + kv_head * stride_vh,
            k_scales_ptr, v_scales_ptr, stride_kp, stride_kt, stride_vp, stride_vt, kv_head * stride_ksh,
            kv_head * stride_vsh, stride_ksp, stride_vsp, HEAD_DIM, BLOCK_D, PAGE, False, QUANTISED, PRECISION,
        )  # fmt: skip
    for index in tl.range(full, last):
        page = tl.load(table_ptr + entry * stride_tb + index).to(tl.int64)
        acc, m, total = _page(
            q, q_scale, acc, m, total, page, length - index * PAGE, k_ptr + kv_head * stride_kh,
            v_ptr + kv_head * stride_vh, k_scales_ptr, v_scales_ptr, stride_kp, stride_kt, stride_vp, stride_vt,
            kv_head * stride_ksh, kv_head * stride_vsh, stride_ksp, stride_vsp, HEAD_DIM, BLOCK_D, PAGE, True,
            QUANTISED, PRECISION,
        )  # fmt: skip
    at = (tl.program_id(1).to(tl.int64) * splits + split) * ROWS + row
    tl.store(acc_ptr + at[:, None] * BLOCK_D + channels[None, :], acc)
    tl.store(m_ptr + at, m)
    tl.store(total_ptr + at, total)


@triton.jit
def merge_kernel(
    acc_ptr, m_ptr, total_ptr, out_ptr, lse_ptr, splits,
    HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    SPLITS: tl.constexpr,
):  # fmt: skip
    """One entry's head: the splits' results weighed by their sums, written to out [batch, heads, head_dim]."""
    entry = (tl.program_id(0) // HEADS).to(tl.int64)
    head = tl.program_id(0) % HEADS
    split = tl.arange(0, SPLITS)
    channels = tl.arange(0, BLOCK_D)
    at = ((entry * (HEADS // GROUP) + head // GROUP) * splits + split) * ROWS + head % GROUP
    m = tl.load(m_ptr + at, mask=split < splits, other=-1.0e30)
    total = tl.load(total_ptr + at, mask=split < splits, other=0.0)
    acc = tl.load(acc_ptr + at[:, None] * BLOCK_D + channels[None, :], mask=(split < splits)[:, None], other=0.0)
    most = tl.max(m, 0)
    weight = tl.exp2(m - most)
    whole = tl.sum(total * weight, 0)
    empty = whole == 0.0
    whole = tl.where(empty, 1.0, whole)
    out = tl.sum(acc * weight[:, None], 0) / whole
    place = entry * HEADS + head
    tl.store(out_ptr + place * HEAD_DIM + channels, out.to(out_ptr.dtype.element_ty), mask=channels < HEAD_DIM)
    tl.store(lse_ptr + place, tl.where(empty, float("-inf"), (most + tl.log2(whole)) * 0.6931471805599453))


def decode_attention(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    k_scales: torch.Tensor | None,
    v_scales: torch.Tensor | None,
    scale: float,
    *,
    warps: int | None = None,
    stages: int | None = None,
    programs: int = _PROGRAMS_PER_MULTIPROCESSOR,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [batch, heads, head_dim], lse [batch, heads]). The keyword arguments are for benchmarks."""
    batch, heads, head_dim = q.shape
    _, kv_heads, page = k_pages.shape[:3]
    group = heads // kv_heads
    rows, block_d = max(16, triton.next_power_of_2(group)), triton.next_power_of_2(head_dim)
    splits = _splits(q.device, batch * kv_heads, page_table.shape[1], programs)
    acc = torch.empty(batch * kv_heads, splits, rows, block_d, dtype=torch.float32, device=q.device)
    m = torch.empty(batch * kv_heads, splits, rows, dtype=torch.float32, device=q.device)
    total = torch.empty_like(m)
    is_fp8 = k_pages.dtype == torch.float8_e4m3fn
    if is_fp8 and k_scales is not None and v_scales is not None and lacks_fp8(q.device):
        # Below (8, 9) Triton can't convert float8_e4m3fn: the pages are dequantised first, by PyTorch.
        k_pages = (k_pages.to(torch.float32) * k_scales[..., None, None]).to(q.dtype)
        v_pages = (v_pages.to(torch.float32) * v_scales[..., None, None]).to(q.dtype)
        k_scales = v_scales = None
    page_bytes = page * block_d * k_pages.element_size()
    if stages is None:
        most = 2 if k_scales is not None else 3
        stages = max(1, min(most, shared_memory_bytes(q.device) // (2 * page_bytes + 16 * 1024)))
    strides = [0, 0, 0, 0]
    if k_scales is not None and v_scales is not None:
        strides = [*k_scales.stride(), *v_scales.stride()]
    split_kernel[(splits, batch * kv_heads)](
        q, k_pages, v_pages, page_table, lengths, k_scales, v_scales, acc, m, total,
        q.stride(0), q.stride(1), *k_pages.stride()[:3], *v_pages.stride()[:3], page_table.stride(0), *strides,
        splits, scale * LOG2_E,
        KV_HEADS=kv_heads, GROUP=group, ROWS=rows, HEAD_DIM=head_dim, BLOCK_D=block_d, PAGE=page,
        QUANTISED=k_scales is not None, PRECISION=precision(q.dtype), num_warps=warps or 4, num_stages=stages,
    )  # fmt: skip
    out = torch.empty(batch, heads, head_dim, dtype=q.dtype, device=q.device)
    lse = torch.empty(batch, heads, dtype=torch.float32, device=q.device)
    merge_kernel[(batch * heads,)](
        acc, m, total, out, lse, splits,
        HEADS=heads, GROUP=group, ROWS=rows, HEAD_DIM=head_dim, BLOCK_D=block_d,
        SPLITS=triton.next_power_of_2(splits),
    )  # fmt: skip
    return out, lse


def _splits(device: torch.device, groups: int, max_pages: int, programs: int) -> int:
    """Enough splits to fill the device a few times over; never more than the longest entry has pages."""
    programs *= max(1, capability(device).multiprocessors)
    return max(1, min(max_pages, triton.cdiv(programs, groups), 256))
