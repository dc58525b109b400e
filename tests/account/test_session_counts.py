"""What a watch adds up for its account."""

from __future__ import annotations

import dataclasses

import pytest

from gradwatch.account.session_counts import SessionCounts
from gradwatch.records.verdict import UNJUDGED
from gradwatch.runtime.overhead_timer import OverheadTimer
from tests.support.sink_records import make_record, make_sites


class Steps:
    """Records of steps, each with a measured call before and one around it, by a clock of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.totals = SessionCounts()
        monkeypatch.setattr("gradwatch.runtime.overhead_timer.perf_counter", lambda: self.now)

    def step(self, n: int, training: float, before: float, until_measured: float, after: float) -> None:
        """The seconds that training takes, the call before, and the two parts of the call that measures the step."""
        self.now += training
        mark = self.totals.own_time.begin()
        self.now += before
        self.totals.own_time.end(mark)
        mark = self.totals.own_time.begin()
        self.now += until_measured
        self.totals.own_time.news()
        self.totals.observe(make_record(make_sites(), optimizer=n % 2, step=n // 2), {})
        self.now += after
        self.totals.own_time.end(mark)

    @property
    def own_share(self) -> float | None:
        return self.totals.watched(steps=3, backwards=3, optimizers=2, parameters=1).own_share


def test_the_own_cost_is_of_the_time_that_passed_however_many_optimizers_step_in_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two optimizers, a fifth of the time each: a fifth, without what attaching took in the first step."""
    steps = Steps(monkeypatch)
    for n in range(6):
        assert steps.own_share is None or n > 2
        steps.step(n, training=0.8, before=0.05, until_measured=0.1, after=0.05 if n else 100.0)
    assert steps.own_share == pytest.approx(0.2)


@pytest.mark.parametrize("until_measured", [0.0, 5.0])
def test_the_own_cost_is_at_most_all_of_the_time(
    until_measured: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where training takes no time at all, and the second step was measured late in its call, or early: 100 %."""
    steps = Steps(monkeypatch)
    for n in range(3):
        late = until_measured if n == 1 else 1.0
        steps.step(n, training=0.0, before=0.5, until_measured=late, after=1.0)
    assert steps.own_share == 1.0


def test_calls_of_threads_that_overlap_are_at_most_all_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that began before another thread's, and ends after the share began, has been going on all the time."""
    steps = Steps(monkeypatch)
    for n in range(2):
        steps.step(n, training=1.0, before=0.5, until_measured=0.5, after=0.5)
    outer = steps.totals.own_time.begin()
    steps.now += 3.0
    inner = steps.totals.own_time.begin()
    steps.totals.own_time.end(inner)
    steps.totals.own_time.news()
    steps.totals.own_time.restart()
    steps.now += 1.0
    steps.totals.own_time.end(outer)
    steps.totals.own_time.news()
    assert steps.totals.own_time.share() == (1.0, 1.0)


def test_time_inside_a_measured_call_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backward's end that leads to a step measures both, one inside the other; what was told is not told again."""
    clock = iter([10.0, 11.0, 14.0, 16.0])
    monkeypatch.setattr("gradwatch.runtime.overhead_timer.perf_counter", lambda: next(clock))
    spent = OverheadTimer()
    outer = spent.begin()
    inner = spent.begin()
    spent.end(inner)
    assert spent.news() == 3.0
    spent.end(outer)
    assert (spent.news(), spent.seconds) == (3.0, 6.0)


def test_what_left_no_record_counts_as_unjudged() -> None:
    """Of what was measured, beside what waits to be judged; a Record without a verdict counts as well."""
    totals = SessionCounts()
    for step in range(5):
        totals.observe(make_record(make_sites(), step=step), {})

    def unjudged(measured: int, waiting: int) -> int:
        totals.measured = measured
        return totals.watched(steps=7, backwards=7, optimizers=1, parameters=1, waiting=waiting).unjudged

    assert [unjudged(*given) for given in ((5, 0), (7, 2), (7, 0), (7, 1))] == [0, 0, 2, 1]
    totals.observe(dataclasses.replace(make_record(make_sites(), step=5), verdict=UNJUDGED), {})
    assert unjudged(6, 0) == 1
