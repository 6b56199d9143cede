"""`foreword plan`: what a document needs before anything is loaded."""

import psutil
from rich.console import Console
from rich.table import Table

from engine.interfaces import Fidelity
from engine.model_folder import length_warning, resolve_model, trained_tokens
from engine.plan import Plan, plan
from engine.spec import load_spec
from service.settings import Settings

_GIB = 1024**3


def plan_command(
    model: str, tokens: int, *, gpu_memory_gib: float | None, fidelity: Fidelity, settings: Settings
) -> None:
    spec = load_spec(resolve_model(model, cache_dir=settings.cache_dir, weights=False))
    memory = psutil.virtual_memory().available if gpu_memory_gib is None else int(gpu_memory_gib * _GIB)
    made = plan(
        spec,
        tokens,
        memory_bytes=memory,
        disk_bytes=settings.kv_disk_bytes,
        resume_cap_bytes=settings.resume_bytes,
        fidelity=fidelity,
    )
    console = Console()
    console.print(_table(made, model, fidelity))
    if gpu_memory_gib is not None:
        console.print("The times are those of the CPU engine.")
    if warning := length_warning(tokens, trained_tokens(model)):
        console.print(f"warning: {warning}", soft_wrap=True)
    for problem in made.problems:
        console.print(f"does not fit: {problem}")
    raise SystemExit(0 if made.fits else 1)


def _table(made: Plan, model: str, fidelity: Fidelity) -> Table:
    table = Table(title=f"{made.num_tokens:,} tokens, {model}, fidelity {fidelity}", show_header=False)
    rows = {
        "weights": _size(made.weight_bytes),
        "hidden states": _size(made.hidden_bytes),
        "K and V of one layer": _size(made.layer_kv_bytes),
        "peak memory of the prefill": _size(made.peak_memory_bytes),
        "memory while answering": _size(made.answer_memory_bytes),
        "stored KV": _size(made.kv_bytes),
        "resume points on disk": _size(made.resume_bytes) if made.resume_bytes else "none: over their cap",
        "prefill": f"about {made.prefill_s:.0f} s",
        "dense prefill": f"about {made.dense_prefill_s:.0f} s",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _size(size_bytes: int) -> str:
    return f"{size_bytes / _GIB:.2f} GiB" if size_bytes >= _GIB / 10 else f"{size_bytes / 1024**2:.1f} MiB"
