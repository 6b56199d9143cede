"""Makes `attn_implementation="foreword"` known to transformers, and costs nothing where transformers isn't used.

Attention functions need torch, which most uses of this package never load: so they are registered when transformers
has loaded its own, by a finder that stands aside for all other modules.
"""

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_AWAITED = "transformers.modeling_utils"


def install() -> None:
    """Register at once where transformers' models are loaded already, else as soon as they are."""
    if _AWAITED in sys.modules:
        _register()
    else:
        sys.meta_path.insert(0, _Finder())


def _register() -> None:
    importlib.import_module("foreword.attention")  # registers itself


class _Finder(MetaPathFinder):
    """Finds the awaited module as everybody else does, and has it register us when it is loaded."""

    def __init__(self) -> None:
        self._asks = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _AWAITED or self._asks:
            return None
        self._asks = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._asks = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(Loader):
    """The module's own loader, and then ours."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader  # what asks for the source or the file later finds the real one
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        _register()
