"""Which rank computes which segments: a pure function of the segments and the number of ranks. Torch-free."""

from collections.abc import Sequence

from engine.chain import Segment

# Neighbours that share launches on a GPU; also what bounds the buffers of one exchange.
STRIPE_SEGMENTS = 16

# By rank: one stripe of neighbouring segments each, which may be empty.
Round = tuple[tuple[Segment, ...], ...]


def deal(segments: Sequence[Segment], ranks: int, *, most: int = STRIPE_SEGMENTS) -> list[Round]:
    """Deal `segments` out in rounds, in order: in each round every rank gets one stripe of at most `most`.

    The order of the ranks turns round with each round, so that a cost that grows with the position is the same for
    all of them over two rounds; stripes differ by one segment at most, and so do the ranks' sums. The last segment is
    rank 0's. Rows of a round need no keys of later rounds.
    """
    if not segments:
        return []
    stripes = min(len(segments), 2 * ranks * -(-len(segments) // (2 * ranks * most)))
    size, longer = divmod(len(segments), stripes)
    ends = [(index + 1) * size + min(index + 1, longer) for index in range(stripes)]
    dealt = [tuple(segments[start:end]) for start, end in zip([0, *ends], ends, strict=False)]
    dealt = [()] * (-len(dealt) % ranks) + dealt  # from the end, so that the last stripe ends a whole round
    rounds = [dealt[first : first + ranks] for first in range(0, len(dealt), ranks)]
    return [tuple(turn if (len(rounds) - index) % 2 == 0 else reversed(turn)) for index, turn in enumerate(rounds)]
