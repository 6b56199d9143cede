"""Documents with planted facts: where the facts stand, and when one counts as recovered."""

import pytest

from loadtests.summaries import make_report


def test_facts_stand_once_at_even_depths_and_come_again_with_the_seed() -> None:
    report = make_report(4000, 5, seed=3)
    assert report == make_report(4000, 5, seed=3)
    assert report.facts != make_report(4000, 5, seed=4).facts
    depths = [report.text.index(fact) / len(report.text) for fact in report.facts]
    assert [report.text.count(fact) for fact in report.facts] == [1] * 5
    assert all(abs(depth - (index + 0.5) / 5) < 0.1 for index, depth in enumerate(depths)), depths


def test_numbers_count_however_they_are_written() -> None:
    report = make_report(4000, 3, seed=0)
    first, second, _ = report.facts
    assert report.recovered("Nothing was found.") == 0
    assert report.recovered(f"It has {int(first):,} books, and the mill {second}.") == 2


def test_more_facts_than_subjects_are_refused() -> None:
    with pytest.raises(ValueError, match="got 11, expected at most 10"):
        make_report(4000, 11, seed=0)
