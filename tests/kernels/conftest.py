"""Kernel tests: Triton's interpreter stands in where there is no GPU, and must be asked for before a kernel loads."""

import os

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # Triton 3.9 warns where it is unset

from kernels import dispatch  # noqa: E402


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "gpu" in item.keywords and not HAS_GPU:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if HAS_GPU else "cpu")


@pytest.fixture(autouse=True)
def _fresh_dispatch():
    """Choices of one test must not leak into the next."""
    dispatch.reset()
    yield
    dispatch.reset()


@pytest.fixture(autouse=True)
def _poison_fresh_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh float buffers hold NaN, integer ones a huge number: an element that no kernel writes shows."""

    def poisoned(make):
        def build(*args, **kwargs):
            tensor = make(*args, **kwargs)
            if tensor.dtype == torch.float8_e4m3fn:
                return tensor.view(torch.uint8).fill_(0x7F).view(torch.float8_e4m3fn)  # its NaN
            return tensor.fill_(float("nan") if tensor.is_floating_point() else 1 << 30)

        return build

    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))
