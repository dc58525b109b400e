"""Periods in which rules were firing."""

from __future__ import annotations

import pytest

from gradwatch.report import firing_periods
from gradwatch.report.firing_periods import FiringEnd, FiringPeriods, Period, firing_end
from tests.support.sink_records import make_event


def test_from_firing_to_resolved() -> None:
    """Each firing of each rule and optimizer until it resolved; repeats and pending ones begin none."""
    found = FiringPeriods()
    found.take(
        [
            make_event("pending", step=1),
            make_event("firing", step=3),
            make_event("repeat", step=4),
            make_event("firing", step=4),
            make_event("firing", step=5, optimizer=1),
            make_event("resolved", step=7),
            make_event("firing", step=9),
        ]
    )
    assert found.periods() == (
        Period("non-finite", "critical", 0, 3, 7),
        Period("non-finite", "critical", 1, 5),
        Period("non-finite", "critical", 0, 9),
    )


def test_the_end_of_a_rule() -> None:
    """That of the last process in which it fired; of several optimizers, one that goes on counts."""
    first, second = FiringPeriods(), FiringPeriods()
    first.take([make_event("firing", step=3), make_event("firing", step=3, optimizer=1)])
    first.take([make_event("resolved", step=7)])
    assert firing_end("non-finite", [first]) == FiringEnd(None, True)
    assert firing_end("non-finite", [first, second]) == FiringEnd(None, False)
    second.take([make_event("firing", step=9), make_event("resolved", step=12)])
    assert firing_end("non-finite", [first, second]) == FiringEnd(12, True)
    assert firing_end("other", [first, second]) is None


def test_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule that fires at every other step of a long run does not fill the page."""
    monkeypatch.setattr(firing_periods, "MOST", 3)
    found = FiringPeriods()
    for step in range(0, 20, 2):
        found.take([make_event("firing", step=step), make_event("resolved", step=step + 1)])
    assert [one.first for one in found.periods()] == [0, 2, 4]


def test_a_period_that_began_in_the_journal_before_may_end_in_this_one() -> None:
    """As where a process has taken up another rule file meanwhile."""
    before, after = FiringPeriods(0), FiringPeriods(1)
    before.take([make_event("firing", step=3)])
    after.take([make_event("resolved", step=9)])
    assert firing_end("non-finite", [before, after]) == FiringEnd(9, True)
