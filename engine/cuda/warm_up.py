"""Compiles what long documents need before the first one comes: some kernels differ from length to length."""

import logging
import time

import torch

from engine.chain import SEGMENT_TOKENS
from engine.model import Model
from engine.sparse.run import RunReport, RunTask, attend_run, draw_rows
from engine.sparse.settings import SparseSettings

log = logging.getLogger(__name__)

_MOST_TOKENS = 1 << 20
_SEGMENTS = 4  # a run long enough for the launches to be those of any longer one
_MEMORY_SHARE = 0.25  # of what is free


def warm_up(model: Model, settings: SparseSettings, *, most_tokens: int = _MOST_TOKENS) -> list[int]:
    """Attend to a short run at each doubled length; returns the lengths.

    They end at `most_tokens`, at the model's context, and where K and V would take too much of the free memory. What is
    compiled stays in Triton's cache on disk, so only a machine's first worker waits for it.
    """
    if settings.policy != "adaptive":
        return []
    started, spec, lengths = time.monotonic(), model.spec, []
    end = 2 * max(settings.crossover_tokens, _SEGMENTS * SEGMENT_TOKENS)
    random = torch.Generator(model.device).manual_seed(0)
    while end <= min(most_tokens, spec.max_positions) and _fits(model, end):
        rows, shape = _SEGMENTS * SEGMENT_TOKENS, (2, spec.kv_heads, end, spec.head_dim)
        # Far apart, so that few blocks have the mass and the run is short.
        k, v = torch.randn(shape, generator=random, dtype=model.dtype, device=model.device).mul_(4)
        q = torch.randn(rows, spec.heads, spec.head_dim, generator=random, dtype=model.dtype, device=model.device)
        drawn = draw_rows(settings, spec.heads, end=end, rows=SEGMENT_TOKENS, seeds=[0] * _SEGMENTS)
        choice, guard = (torch.from_numpy(part).to(model.device) for part in drawn)
        task = RunTask(0, end - rows, q, k, v, torch.empty_like(q), choice, guard, settings.row_block_at(end))
        attend_run(task, settings, RunReport())
        lengths.append(end)
        end *= 2
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
        torch.cuda.empty_cache()
    log.info("kernels compiled", extra={"lengths": lengths, "seconds": round(time.monotonic() - started, 2)})
    return lengths


def _fits(model: Model, tokens: int) -> bool:
    if model.device.type != "cuda":
        return True
    free, _ = torch.cuda.mem_get_info(model.device)
    return tokens * model.spec.kv_bytes_per_token(model.dtype.itemsize) <= _MEMORY_SHARE * free
