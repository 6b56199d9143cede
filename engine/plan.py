"""What a document will need and about how long it will take, before anything is loaded. Torch-free."""

from dataclasses import dataclass

from engine.chain import SEGMENT_TOKENS
from engine.interfaces import Fidelity
from engine.sparse.settings import SparseSettings, for_fidelity
from engine.spec import ModelSpec
from engine.work import MachineRates, PrefillWork

# Beside weights, hidden states and one layer's K and V: buffers of a segment, of the store's writer and reader.
_WORK_BYTES = 600 << 20


@dataclass(frozen=True)
class Plan:
    """Bytes and seconds of one prefill; `problems` says what does not fit, in words with both numbers."""

    num_tokens: int
    weight_bytes: int
    hidden_bytes: int
    layer_kv_bytes: int  # one layer's K and V, held while it is computed
    kv_bytes: int  # all layers', kept on disk
    resume_bytes: int  # two copies of the hidden states on disk
    peak_memory_bytes: int
    answer_memory_bytes: int  # all KV is in memory while an answer lives
    kv_place: str
    prefill_s: float
    dense_prefill_s: float
    problems: tuple[str, ...]

    @property
    def fits(self) -> bool:
        return not self.problems


def plan(
    spec: ModelSpec,
    num_tokens: int,
    *,
    itemsize: int = 2,
    linear_itemsize: int | None = None,
    kv_itemsize: int | None = None,
    memory_bytes: int | None = None,
    disk_bytes: int | None = None,
    resume_cap_bytes: int | None = None,
    fidelity: Fidelity = "default",
    sparse: SparseSettings | None = None,
    rates: MachineRates | None = None,
) -> Plan:
    """Plan a prefill of `num_tokens` (at least 1) with weights and KV of `itemsize` bytes a number; the layers'
    linears and the kept KV may have their own.

    `memory_bytes` (of the GPU, or free on the host), `disk_bytes` (the KV cap) and `resume_cap_bytes` are limits, None
    for no limit. `rates` default to the machine that was measured (engine.work). Raises ValueError for no tokens.
    """
    if num_tokens < 1:
        raise ValueError(f"num_tokens: got {num_tokens}, expected at least 1")
    settings = for_fidelity(sparse or SparseSettings(), fidelity)
    work = PrefillWork(spec, rates or MachineRates())
    embeddings = spec.vocabulary * spec.hidden * (1 if spec.tied_embeddings else 2)
    weights = spec.linear_parameters * (linear_itemsize or itemsize) + embeddings * itemsize
    hidden = num_tokens * spec.hidden * itemsize
    layer_kv = num_tokens * spec.kv_bytes_per_token(itemsize)
    kv = num_tokens * spec.kv_bytes_per_token(kv_itemsize or itemsize) * spec.num_layers
    peak = weights + hidden + layer_kv + _WORK_BYTES
    answer = weights + kv + _WORK_BYTES
    problems = []
    if num_tokens > spec.max_positions:
        problems.append(f"{num_tokens} tokens are more than the model's {spec.max_positions} positions")
    if memory_bytes is not None and peak > memory_bytes:
        problems.append(f"the prefill needs {_gib(peak)} of memory, {_gib(memory_bytes)} are there")
    if memory_bytes is not None and answer > memory_bytes:
        problems.append(f"an answer needs {_gib(answer)} of memory, {_gib(memory_bytes)} are there")
    if disk_bytes is not None and kv > disk_bytes:
        problems.append(f"the KV needs {_gib(kv)} of disk, {_gib(disk_bytes)} may be used")
    resume = 2 * hidden
    if resume_cap_bytes is not None and resume > resume_cap_bytes:
        resume = 0  # the prefill goes on without resume points

    def seconds(choice: SparseSettings) -> float:
        return spec.num_layers * work.layer_s(0, num_tokens, choice, segment=SEGMENT_TOKENS)

    return Plan(
        num_tokens=num_tokens,
        weight_bytes=weights,
        hidden_bytes=hidden,
        layer_kv_bytes=layer_kv,
        kv_bytes=kv,
        resume_bytes=resume,
        peak_memory_bytes=peak,
        answer_memory_bytes=answer,
        kv_place="one layer in memory, all layers on disk; all in memory while an answer lives",
        prefill_s=seconds(settings),
        dense_prefill_s=seconds(SparseSettings(policy="dense")),
        problems=tuple(problems),
    )


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 1024**3:.2f} GiB"
