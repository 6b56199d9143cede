"""Deficit round-robin: shares by cost, no starvation, whatever the costs."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.queue.fairness import QUANTUM, choose


def serve(costs: dict[str, int], times: int) -> list[str]:
    deficits: dict[str, int] = {}
    current, served = None, []
    for _ in range(times):
        choice = choose(costs, deficits, current)
        deficits, current = dict(choice.deficits), choice.tenant
        served.append(current)
    return served


def by_the_book(costs: dict[str, int], times: int) -> list[str]:
    """The algorithm as published, with its loop over visits."""
    names = sorted(costs)
    credit, served, place = dict.fromkeys(names, 0), [], 0
    while True:
        name = names[place % len(names)]
        credit[name] += QUANTUM
        while credit[name] >= max(costs[name], QUANTUM):
            credit[name] -= max(costs[name], QUANTUM)
            served.append(name)
            if len(served) == times:
                return served
        place += 1


@given(
    st.dictionaries(st.sampled_from("abcdefg"), st.integers(0, 20 * QUANTUM), min_size=1),
    st.integers(1, 60),
)
def test_same_order_as_the_published_loop(costs: dict[str, int], times: int) -> None:
    assert serve(costs, times) == by_the_book(costs, times)


def test_equal_tenants_take_turns() -> None:
    assert serve({"a": 10, "b": 10, "c": 10}, 6) == ["a", "b", "c", "a", "b", "c"]


def test_shares_are_equal_in_tokens() -> None:
    counts = Counter(serve({"million": 1_000_000, "question": 2_000}, 5010))
    assert counts["million"] == 10


def test_credit_of_an_absent_tenant_is_forgotten() -> None:
    choice = choose({"here": 10}, {"here": 0, "gone": 10**9}, "gone")
    assert choice.tenant == "here"
    assert "gone" not in choice.deficits


def test_nobody_waiting() -> None:
    with pytest.raises(ValueError, match="no tenant"):
        choose({}, {}, None)
