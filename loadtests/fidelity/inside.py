"""What evaluations see of an engine that its callers need not: weights, policy, and a prefix's KV itself."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from engine.chain import TokenIds
from engine.engine import LocalEngine
from engine.interfaces import AnswerRequest, Fidelity, SamplingParams
from engine.model import Model
from engine.sparse.settings import SparseSettings

# (layer, q [rows, heads, head_dim]) → (out, lse [rows, heads]) over the whole prefix
AttendPrefix = Callable[[int, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def model_of(engine: LocalEngine) -> Model:
    return engine._model


def settings_of(engine: LocalEngine) -> SparseSettings:
    """The policy of fidelity `default`."""
    return engine._sparse


@contextmanager
def open_prefix(engine: LocalEngine, prefix: TokenIds, *, salt: bytes, fidelity: Fidelity) -> Iterator[AttendPrefix]:
    """Attention to a stored prefix as the engine's answers have it, kept open. Raises KVMissing, OutOfMemory."""
    chain = engine.chain(prefix, salt, fidelity)
    shared = engine._share(chain, AnswerRequest(prefix, prefix[-1:], salt, SamplingParams(), fidelity))
    try:
        yield shared.attend
    finally:
        engine._unshare(chain[-1].key, shared)
