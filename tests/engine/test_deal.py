"""Which rank computes what: everything once, in order, in shares that cost the same."""

import pytest

from engine.chain import SEGMENT_TOKENS, Segment
from engine.parallel.deal import STRIPE_SEGMENTS, deal


def segments(count: int, first: int = 0) -> list[Segment]:
    return [
        Segment(index, index * SEGMENT_TOKENS, (index + 1) * SEGMENT_TOKENS, str(index))
        for index in range(first, first + count)
    ]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7, 8])
def test_every_segment_is_dealt_once_and_in_order(ranks: int) -> None:
    for count in (0, 1, 2, 5, 7, 8, 31, 32, 33, 100, 257):
        new = segments(count, first=3)
        rounds = deal(new, ranks)
        assert sorted((s for turn in rounds for stripe in turn for s in stripe), key=lambda s: s.index) == new
        assert all(len(turn) == ranks for turn in rounds)
        for stripe in (stripe for turn in rounds for stripe in turn):
            assert len(stripe) <= STRIPE_SEGMENTS
            assert [s.index for s in stripe] == list(
                range(stripe[0].index, stripe[0].index + len(stripe)) if stripe else []
            )
        # No row needs keys of a later round.
        lasts = [max((s.index for stripe in turn for s in stripe), default=-1) for turn in rounds]
        firsts = [min((s.index for stripe in turn for s in stripe), default=-1) for turn in rounds]
        assert all(last < first for last, first in zip(lasts, firsts[1:], strict=False))
        if count:
            assert new[-1] in rounds[-1][0]


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("tokens", [131_072, 524_288, 1_048_576])
def test_ranks_cost_the_same(ranks: int, tokens: int) -> None:
    """Whatever share of it grows with the position: linears alone, dense attention alone."""
    new = segments(tokens // SEGMENT_TOKENS)
    for share in (0.0, 0.3, 1.0):
        cost = [0.0] * ranks
        for turn in deal(new, ranks):
            for rank, stripe in enumerate(turn):
                cost[rank] += sum((1 - share) + share * 2 * (s.index + 0.5) / len(new) for s in stripe)
        assert max(cost) / (sum(cost) / ranks) < (1.03 if tokens > 131_072 else 1.2), (share, cost)


def test_no_rank_waits_long_in_a_round() -> None:
    """At a million tokens the stripes of a round are neighbours: their costs differ by little."""
    rounds = deal(segments(256), 2)
    assert [tuple(map(len, turn)) for turn in rounds] == [(16, 16)] * 8
    later = [turn[0][0].index > turn[1][0].index for turn in rounds]
    assert later == [False, True] * 4
