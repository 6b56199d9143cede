"""Which implementation of each operation runs on a device: decided once, by capability or a trial, and logged.

An operation is a folder of this package; a *path* is a module in it with a function of the operation's public
signature. A path's module may define `unsupported(capability) -> str | None`: why it can't run there. Nothing here
touches a device at import.
"""

import importlib
import importlib.util
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from types import ModuleType

import torch

log = logging.getLogger(__name__)

OPS = (
    "block_sparse_attention",
    "block_lse",
    "block_scores",
    "block_selection",
    "sampled_lse",
    "dense_attention",
    "full_attention",
    "decode_attention",
    "rms_norm",
    "rope",
    "swiglu",
    "gated_mlp",
    "fp8_linear",
    "row_quant",
    "kv_quant",
)

# Path → module of the operation's folder, best first. A path whose module an operation lacks is passed over.
_CUDA_ORDER = ("gluon", "fa3", "scaled_mm", "triton", "sdpa", "reference")
_CPU_ORDER = ("cpu", "reference")
_MODULES = {
    "gluon": "gluon_kernel",
    "triton": "triton_kernel",
    "fa3": "fa3",
    "sdpa": "sdpa",
    "scaled_mm": "scaled_mm",
    "cpu": "cpu",
    "reference": "reference",
}


@dataclass(frozen=True)
class Capability:
    """What a device can do, in numbers. Never its name."""

    device_type: str
    compute: tuple[int, int]  # (0, 0) without CUDA
    shared_memory_bytes: int  # a block may opt in to; 0 without CUDA
    multiprocessors: int
    triton: str | None  # Triton's version, None where it can't be imported


@dataclass(frozen=True)
class Choice:
    path: str
    reason: str
    module: ModuleType


_choices: dict[tuple[str, str], Choice] = {}
_overrides: dict[str, str] = {}
_failed: dict[tuple[str, str, str], str] = {}


@cache
def capability(device: torch.device) -> Capability:
    """Numbers of `device`, read once."""
    triton_version = None
    if importlib.util.find_spec("triton") is not None:
        triton_version = importlib.import_module("triton").__version__
    if device.type != "cuda":
        return Capability(device.type, (0, 0), 0, 0, triton_version)
    properties = torch.cuda.get_device_properties(device)
    return Capability(
        "cuda",
        (properties.major, properties.minor),
        int(getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)),
        properties.multi_processor_count,
        triton_version,
    )


def implementation(op: str, device: torch.device) -> ModuleType:
    """The module that runs `op` on `device`. Raises ValueError for an unknown operation or overriding path."""
    if op in _overrides:
        return _load(op, _overrides[op])
    key = (op, str(device))
    if key not in _choices:
        _choices[key] = _choose(op, device)
        log.info("kernel path", extra={"op": op, "device": str(device), **_describe(_choices[key])})
    return _choices[key].module


def paths() -> dict[str, tuple[str, str]]:
    """Operation → (path, reason) of every operation decided so far: a snapshot for metrics and `foreword check`.

    With several devices in one process the last one decided is shown.
    """
    return {op: (choice.path, choice.reason) for (op, _), choice in sorted(_choices.items())}


def resolve_all(device: torch.device) -> dict[str, tuple[str, str]]:
    """Decide every operation for `device` and return `paths()`."""
    for op in OPS:
        implementation(op, device)
    return paths()


def candidates(op: str, device: torch.device) -> list[tuple[str, str | None]]:
    """(path, why it can't run here or None) of every path that `op` has for a device of this type, best first."""
    order = _CUDA_ORDER if device.type == "cuda" else _CPU_ORDER
    return [(path, _obstacle(op, path, device)) for path in order if _exists(op, path)]


def mark_failed(op: str, path: str, device: torch.device, reason: str) -> None:
    """Take `path` out of the choice for `device` (a self-test or a compile failed); the next best one takes over."""
    log.warning("kernel path failed", extra={"op": op, "path": path, "device": str(device), "reason": reason})
    _failed[op, path, str(device)] = reason
    _choices.pop((op, str(device)), None)


@contextmanager
def override(op: str, path: str) -> Iterator[None]:
    """Run `op` through `path` whatever the device, for tests and benchmarks. Not thread-safe."""
    _load(op, path)
    before = _overrides.get(op)
    _overrides[op] = path
    try:
        yield
    finally:
        del _overrides[op]
        if before is not None:
            _overrides[op] = before


def reset() -> None:
    """Forget every decision and failure."""
    _choices.clear()
    _failed.clear()


def _choose(op: str, device: torch.device) -> Choice:
    if op not in OPS:
        raise ValueError(f"unknown operation {op!r}; expected one of {', '.join(OPS)}")
    passed_over: list[str] = []
    for path, obstacle in candidates(op, device):
        if obstacle is None:
            return Choice(path, "; ".join(passed_over) or "first choice", _load(op, path))
        passed_over.append(f"{path}: {obstacle}")
    raise RuntimeError(f"{op} has no path on {device}: {'; '.join(passed_over)}")


def _obstacle(op: str, path: str, device: torch.device) -> str | None:
    if (op, path, str(device)) in _failed:
        return _failed[op, path, str(device)]
    numbers = capability(device)
    if path in ("triton", "gluon") and numbers.triton is None:
        return "Triton is not installed"
    try:
        module = _load(op, path)
    except ImportError as error:
        return f"import failed: {error}"
    unsupported = getattr(module, "unsupported", None)
    return unsupported(numbers) if unsupported else None


def _exists(op: str, path: str) -> bool:
    return importlib.util.find_spec(f"kernels.{op}.{_MODULES[path]}") is not None


def _load(op: str, path: str) -> ModuleType:
    if op not in OPS or path not in _MODULES or not _exists(op, path):
        raise ValueError(f"operation {op!r} has no path {path!r}")
    return importlib.import_module(f"kernels.{op}.{_MODULES[path]}")


def _describe(choice: Choice) -> dict[str, str]:
    return {"path": choice.path, "reason": choice.reason}
