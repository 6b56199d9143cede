"""Kernel tests: a fresh dispatch for each, and memory that shows what no kernel wrote."""

import pytest
import torch

from kernels import dispatch

HAS_GPU = torch.cuda.is_available()


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
            if tensor.dtype == torch.int8:
                return tensor.fill_(-128)  # which no quantised value is
            return tensor.fill_(float("nan") if tensor.is_floating_point() else 1 << 30)

        return build

    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))
