"""Dense attention of one segment, in bounded pieces."""

from collections.abc import Iterator

from engine.sparse.task import SegmentTask
from kernels.dense_attention import dense_attention

_SMALLEST_TILE = 64


def attend_dense(task: SegmentTask) -> Iterator[None]:
    for first, last in task.pieces(_SMALLEST_TILE):
        task.out[first:last], _ = dense_attention(task.q[first:last], task.k, task.v, row_offset=task.start + first)
        yield
