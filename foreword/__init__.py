"""Foreword: read a long document once, keep its KV, answer from it.

For transformers: importing this package makes `attn_implementation="foreword"` known (docs/transformers.md).
"""

from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from foreword.hook import install

if TYPE_CHECKING:
    from foreword.attention import attention_report, configure_attention

__all__ = ["__version__", "attention_report", "configure_attention"]
__version__ = version("foreword")

install()


def __getattr__(name: str) -> Any:
    """The functions for transformers load torch, so they are imported when they are asked for."""
    if name in ("attention_report", "configure_attention"):
        from foreword import attention

        return getattr(attention, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
