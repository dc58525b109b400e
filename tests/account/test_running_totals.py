"""What a watch adds up for its account."""

from __future__ import annotations

import pytest

from gradwatch.account.running_totals import RunningTotals
from gradwatch.runtime.own_time import OwnTime
from tests.support.sink_records import make_record, make_sites


def test_the_own_cost_is_of_the_time_that_passed_however_many_optimizers_step_in_it() -> None:
    """Two optimizers a second apart, a fifth of a second each: a fifth, without what attaching took."""
    totals = RunningTotals()
    for n in range(6):
        spent = 100.0 if n < 2 else 0.2  # the second Record has what was spent after the first was made
        totals.observe(
            make_record(
                make_sites(),
                optimizer=n % 2,
                step=n // 2,
                wall_time=1e9 + n,
                step_seconds=2.0,
                overhead=spent,
            )
        )
    assert totals.watched(steps=3, backwards=3, optimizers=2, parameters=1).own_share == pytest.approx(0.2)


def test_time_inside_a_measured_call_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backward's end that leads to a step measures both, one inside the other; what was told is not told again."""
    clock = iter([10.0, 11.0, 14.0, 16.0])
    monkeypatch.setattr("gradwatch.runtime.own_time.perf_counter", lambda: next(clock))
    spent = OwnTime()
    outer = spent.begin()
    inner = spent.begin()
    spent.end(inner)
    assert spent.news() == 3.0
    spent.end(outer)
    assert (spent.news(), spent.seconds) == (3.0, 6.0)
