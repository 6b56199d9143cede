"""A copy: one writer's set of files of one segment.

Its id is random and never used again. So two writers of the same key never touch each other's files, a removed copy
can't be mistaken for its successor, and the index alone says which copy counts.
"""

from dataclasses import dataclass

from engine.interfaces import KVLayout
from engine.kv_store.group_file import GroupFile
from engine.kv_store.layout import segment_file_bytes


@dataclass(frozen=True)
class Copy:
    id: str  # 16 hex digits
    key: str
    start: int
    end: int
    layout: KVLayout
    size_bytes: int  # counted against the cap: reserved in full while it is written

    @property
    def name(self) -> str:
        """Of the bytes: an index that comes to call this copy another segment's must not find them in memory."""
        return f"{self.id}-{self.key}"

    def block(self, group: int) -> GroupFile:
        return GroupFile(self.key, self.start, self.end, group, self.layout)

    @property
    def layer_bytes(self) -> int:
        return self.layout.layer_bytes(self.end - self.start)

    @property
    def full_bytes(self) -> int:
        """Bytes of all its files once they are written."""
        return segment_file_bytes(self.layout, self.end - self.start)

    @property
    def blocks(self) -> list[GroupFile]:
        return [self.block(group) for group in range(self.layout.num_groups)]
