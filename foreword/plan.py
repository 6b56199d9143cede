"""`foreword plan`: what a document needs before anything is loaded."""

import psutil
from rich.console import Console
from rich.table import Table

from engine.interfaces import Fidelity
from engine.model_folder import length_warning, resolve_model, trained_tokens
from engine.plan import Plan, plan
from engine.sparse.settings import default_settings
from engine.spec import load_spec
from engine.work import gpu_rates
from service.settings import Settings

_GIB = 1024**3


def plan_command(
    model: str, tokens: int, *, gpu_memory_gib: float | None, fidelity: Fidelity, settings: Settings
) -> None:
    spec = load_spec(resolve_model(model, cache_dir=settings.cache_dir, weights=False))
    on_gpu = gpu_memory_gib is not None
    memory = int(gpu_memory_gib * _GIB) if gpu_memory_gib is not None else psutil.virtual_memory().available
    made = plan(
        spec,
        tokens,
        linear_itemsize=1 if settings.linears == "float8" else None,
        kv_itemsize=1 if settings.kv_dtype in ("float8", "int8") else None,
        memory_bytes=memory,
        disk_bytes=settings.kv_disk_bytes,
        resume_cap_bytes=settings.resume_bytes,
        fidelity=fidelity,
        sparse=default_settings("cuda" if on_gpu else "cpu"),
        rates=gpu_rates(settings.linears) if on_gpu else None,
    )
    console = Console()
    console.print(_table(made, model, fidelity))
    if on_gpu:
        console.print("The times are those of one H200; other GPUs take longer.")
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
