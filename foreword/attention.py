"""`attn_implementation="foreword"` in transformers: sparse prefill by our policies, dense decoding.

The mask function says which keys exist: None where all do, or a span (first, end) a batch item, int64
[batch, 1, 1, 2], where a cache is longer than what is in it or rows are padded on the left. Any other mask, and
whatever else our policies don't know, goes to SDPA, with one warning a reason.
"""

import logging
from collections.abc import Iterator
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import (
    AttentionMaskInterface,
    causal_mask_function,
    prepare_padding_mask,
    sdpa_mask,
)
from transformers.modeling_utils import AttentionInterface

from engine.chain import SEGMENT_TOKENS
from engine.sparse.attend import attend
from engine.sparse.report import AttentionReport
from engine.sparse.settings import SparseSettings, chosen_settings
from engine.sparse.task import SegmentTask
from kernels.checks import FLOATS, HEAD_DIMS

log = logging.getLogger(__name__)

NAME = "foreword"
_DENSE = SparseSettings(policy="dense")
# What each attention module kept since its last row 0.
_reports: WeakKeyDictionary[torch.nn.Module, AttentionReport] = WeakKeyDictionary()


def configure_attention(model: Any, **options: Any) -> None:
    """Choose the policy of a transformers model; `options` are those of engine.sparse.settings.chosen_settings.

    They are kept in the model's config, and saved with it. Raises ValueError for an option or policy that is unknown,
    ModelError where a head config is damaged or another model's.
    """
    config = model.config.get_text_config()
    settings = chosen_settings(**options)
    if settings.head_config is not None:
        settings.head_config.check(num_layers=config.num_hidden_layers, heads=config.num_attention_heads)
    config.foreword = {name: value for name, value in options.items() if value is not None}


def attention_report(model: Any) -> dict[str, Any]:
    """What the last prefill of a transformers model kept, over all items of its batch.

    `density` of the causal pairs, `recall` of the softmax mass (mean, p5, worst over segments and KV-head groups; None
    where all was dense), `below_target`, and `heads`: "layer:group" → pattern.
    """
    whole, target = AttentionReport(), 0.0
    for module in model.modules():
        if (report := _reports.get(module)) is not None:
            whole.add(report)
            target = _settings(module, torch.device("cpu")).target
    recall = whole.recall(target)
    return {
        "density": whole.density,
        "recall": None if recall is None else {"mean": recall.mean, "p5": recall.p5, "worst": recall.worst},
        "below_target": whole.below_target,
        "heads": whole.head_patterns(),
    }


# --- the mask ---------------------------------------------------------------------------------------------------------


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    **kwargs: Any,
) -> torch.Tensor | None:
    """None or spans where rows are plainly causal, else SDPA's own mask. Arguments are those of `sdpa_mask`."""

    def own(*, skip: bool) -> torch.Tensor | None:
        made: torch.Tensor | None = sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            local_size=local_size,
            allow_is_causal_skip=skip,
            **kwargs,
        )
        return made

    if q_length == 1:
        return own(skip=allow_is_causal_skip)
    # transformers allows the skip exactly where nothing but causality, a window and padding decides.
    windowed = local_size is not None and kv_length >= local_size
    if not allow_is_causal_skip or windowed or kv_offset or torch.compiler.is_compiling():
        return own(skip=False)
    end = int(q_offset) + q_length
    padding = prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if padding is None:
        firsts = torch.zeros(batch_size, dtype=torch.int64)
    else:
        there = padding[:, :end].to(torch.bool)
        firsts = there.int().argmax(1)
        if bool((there.sum(1) != end - firsts).any()):
            return own(skip=False)  # padded on the right, or in between
    if kv_length == end and not bool(firsts.any()):
        return None
    return torch.stack((firsts, torch.full_like(firsts, end)), 1)[:, None, None]


# --- the attention ----------------------------------------------------------------------------------------------------


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """query [batch, heads, rows, head_dim], key and value [batch, kv_heads, keys, head_dim] → [batch, rows, heads,
    head_dim]; the rows are the last ones of what the cache holds.

    Raises ValueError for attention sinks, which SDPA doesn't know either.
    """
    if query.shape[2] == 1:
        return _sdpa(module, query, key, value, attention_mask, dropout, scaling, is_causal, **kwargs)
    causal = _causal(module, is_causal)
    obstacle = _obstacle(module, query, key, value, attention_mask, dropout, causal, kwargs)
    if obstacle is not None:
        _warn_once(obstacle)
        kwargs.pop("output_attentions", None)  # warned of
        whole = _whole_mask(query, key, attention_mask) if causal else attention_mask
        return _sdpa(module, query, key, value, whole, dropout, scaling, is_causal, **kwargs)
    head_dim, settings = query.shape[3], _settings(module, query.device)
    if scaling is not None and scaling != head_dim**-0.5:
        query = query * (scaling * head_dim**0.5)
    out = query.new_empty(query.shape[0], query.shape[2], query.shape[1], head_dim)
    spans = _spans(query, key, attention_mask)
    if module not in _reports or spans[0][1] == query.shape[2]:  # these rows are the cache's first
        _reports[module] = AttentionReport()
    with torch.no_grad():
        for item, (first, end) in enumerate(spans):
            padding = max(first - (end - query.shape[2]), 0)  # rows that stand for nothing
            out[item, :padding] = 0
            if padding < query.shape[2]:
                q = query[item, :, padding:].transpose(0, 1)
                _attend(module, q, key[item, :, first:end], value[item, :, first:end], out[item, padding:], settings)
    return out, None


def _sdpa(*arguments: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
    attended: tuple[torch.Tensor, None] = sdpa_attention_forward(*arguments, **kwargs)
    return attended


def _causal(module: torch.nn.Module, is_causal: bool | None) -> bool:
    own = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    return bool(own) and bool(getattr(getattr(module, "config", None), "is_causal", True))


def _obstacle(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float,
    causal: bool,
    kwargs: dict[str, Any],
) -> str | None:
    """What our policies can't do about this call, in words."""
    if kwargs.get("s_aux") is not None:
        raise ValueError("attention sinks are known to neither 'foreword' nor SDPA: load the model with 'eager'")
    window = kwargs.get("sliding_window")
    head_dim = query.shape[3]
    reasons = {
        "torch.compile of the prefill": torch.compiler.is_compiling(),
        "attention that isn't causal": not causal,
        "a sliding window": window is not None and key.shape[2] > window,
        "a mask beyond causality and padding on the left": attention_mask is not None and not _is_spans(attention_mask),
        "dropout": dropout > 0,
        "gradients (use torch.no_grad)": torch.is_grad_enabled() and query.requires_grad,
        "soft-capped scores": kwargs.get("softcap") is not None,
        "a position bias": kwargs.get("position_bias") is not None,
        "output_attentions": bool(kwargs.get("output_attentions")),
        f"heads of {head_dim}": head_dim not in HEAD_DIMS or value.shape[3] != head_dim,
        f"{query.dtype}": query.dtype not in FLOATS or not query.dtype == key.dtype == value.dtype,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


@lru_cache
def _warn_once(obstacle: str) -> None:
    log.warning("attn_implementation='foreword' does not support %s: computed by SDPA instead", obstacle)


def _is_spans(attention_mask: torch.Tensor) -> bool:
    return attention_mask.dtype == torch.int64


def _spans(query: torch.Tensor, key: torch.Tensor, attention_mask: torch.Tensor | None) -> list[tuple[int, int]]:
    """Of each batch item."""
    if attention_mask is None:
        return [(0, key.shape[2])] * query.shape[0]
    return [(first, end) for first, end in attention_mask[:, 0, 0].tolist()]


def _whole_mask(query: torch.Tensor, key: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor | None:
    """What SDPA needs in place of our None or spans: bool [batch, 1, rows, keys], or None for its own causality."""
    rows, keys = query.shape[2], key.shape[2]
    if (attention_mask is not None and not _is_spans(attention_mask)) or (attention_mask is None and rows == keys):
        return attention_mask
    spans = torch.tensor(_spans(query, key, attention_mask), device=query.device)[:, None, None]
    positions = spans[..., 1:] - rows + torch.arange(rows, device=query.device)[:, None]  # [batch, 1, rows, 1]
    columns = torch.arange(keys, device=query.device)
    return (columns <= positions) & (columns >= spans[..., :1])


def _attend(
    module: torch.nn.Module,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    settings: SparseSettings,
) -> None:
    """One batch item. q [rows, heads, head_dim], k and v [kv_heads, keys, head_dim]; q's are the last positions."""
    layer, start = int(getattr(module, "layer_idx", 0)), k.shape[1] - q.shape[0]
    for first, last, sparse in _pieces(start, k.shape[1], settings.row_block):
        rows = slice(first - start, last - start)
        task = SegmentTask(
            layer=layer, start=first, q=q[rows], k=k[:, :last], v=v[:, :last], out=out[rows], seed=first ^ layer
        )
        for _ in attend(task, settings if sparse else _DENSE, _reports[module]):
            pass


def _pieces(start: int, end: int, row_block: int) -> Iterator[tuple[int, int, bool]]:
    """(first, last, may be sparse): segments at fixed positions, so that whole chunks change nothing.

    What lies before the first multiple of a row block, and what has fewer rows than one, is dense: a choice of blocks
    would cost more than it saves.
    """
    aligned = min(-(-start // row_block) * row_block, end)
    if aligned > start:
        yield start, aligned, False
    while aligned < end:
        last = min(aligned // SEGMENT_TOKENS * SEGMENT_TOKENS + SEGMENT_TOKENS, end)
        yield aligned, last, last - aligned >= row_block
        aligned = last


def _settings(module: torch.nn.Module, device: torch.device) -> SparseSettings:
    config: Any = getattr(module, "config", None)
    options: dict[str, Any] = getattr(config, "foreword", None) or {}
    settings = _parsed(tuple(sorted(options.items())), device.type)
    if settings.head_config is not None:
        settings.head_config.check(num_layers=config.num_hidden_layers, heads=config.num_attention_heads)
    return settings


@lru_cache(maxsize=32)
def _parsed(options: tuple[tuple[str, Any], ...], device_type: str) -> SparseSettings:
    return chosen_settings(**dict(options), device_type=device_type)


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, mask)
