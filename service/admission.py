"""Which prefills may be under way at once in this worker: those whose memory fits together."""

from collections.abc import Callable, Sequence

import psutil

MARGIN_BYTES = 512 << 20  # left to answers, ingests and the machine


def free_memory(device: str = "cpu") -> int:
    """Bytes that can be had where prefills hold theirs: of the GPU, or of the host without swapping."""
    if device == "cuda":
        import torch

        free_bytes, _ = torch.cuda.mem_get_info()
        return free_bytes + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    return int(psutil.virtual_memory().available)


class Admission:
    """Plans by what each prefill will come to need, since memory that it hasn't touched yet still looks free."""

    def __init__(
        self,
        prefill_bytes: Callable[[int], int] = lambda num_tokens: 0,
        free_bytes: Callable[[], int] = free_memory,
    ) -> None:
        """`prefill_bytes`: of tokens, the memory that a prefill of so many holds (engine.plan)."""
        self._prefill_bytes = prefill_bytes
        self._free_bytes = free_bytes
        self._room = 0

    def measure(self) -> None:
        """Look at the free memory; no prefill may be under way."""
        self._room = self._free_bytes() - MARGIN_BYTES

    def fits(self, num_tokens: int, beside: Sequence[int]) -> bool:
        """Whether a prefill may begin beside others of so many tokens. One by itself always may."""
        needed = sum(self._prefill_bytes(tokens) for tokens in (num_tokens, *beside))
        return not beside or needed <= self._room
