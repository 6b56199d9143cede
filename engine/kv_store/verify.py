"""Checking stored KV without serving it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine.errors import KVCorrupt
from engine.kv_store.blocks import BlockFolder
from engine.kv_store.copies import Copy


@dataclass(frozen=True)
class BadBlock:
    """One group file that must not be served."""

    copy: Copy
    group: int
    reason: str
    corrupt: bool  # False: it could not be read at all


@dataclass
class VerifyReport:
    num_segments: int = 0
    num_blocks: int = 0  # group files
    size_bytes: int = 0
    bad: list[BadBlock] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.bad


def verify_copies(copies: Sequence[Copy], blocks: BlockFolder, on_progress: Callable[[int, int], None]) -> VerifyReport:
    """Check every block of `copies`, which the caller leases."""
    total = sum(copy.size_bytes for copy in copies)
    report = VerifyReport(num_segments=len(copies))
    for copy in copies:
        for block in copy.blocks:
            report.num_blocks += 1
            report.size_bytes += block.size_bytes
            try:
                blocks.check(copy, block.group)
            except (KVCorrupt, OSError) as error:
                corrupt = isinstance(error, KVCorrupt)
                report.bad.append(BadBlock(copy, block.group, str(error), corrupt))
            on_progress(report.size_bytes, total)
    return report
