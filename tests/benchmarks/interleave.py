"""Fair timing on a machine that is not quiet: everybody in one process, in turns, in shuffled order.

A round gives each contender one turn in an order drawn anew, so that whatever slows the machine for a while
slows all alike; differences are taken within a round and the median of these differences is reported, so that
one preempted step decides nothing. Means are given too: a cost paid every hundredth step shows only there.

Axes: N rounds, T timed steps of a turn, B bootstrap resamples.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Seconds = NDArray[np.float64]

BOOTSTRAP = 2000
"""Resamples of the rounds behind every interval (95 %, percentile method; Efron 1979)."""


class Sample(NamedTuple):
    """One timed step, seconds: `wall` by perf_counter, `cpu` of all threads of this process.

    `cpu` is blind to preemption by neighbours, and sees the work a contender moves to its own threads.
    """

    wall: float
    cpu: float


class Interval(NamedTuple):
    """A value with its 95 % bootstrap interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Comparison:
    """One contender against the baseline; `added` and `added_mean` in µs a step."""

    rounds: int
    median_ms: float
    ratio: float
    added: Interval
    added_mean: Interval


def timed(step: Callable[[], None]) -> Callable[[], Sample]:
    """The step, and how long all of it took."""

    def sample() -> Sample:
        cpu, wall = time.process_time(), time.perf_counter()
        step()
        return Sample(time.perf_counter() - wall, time.process_time() - cpu)

    return sample


@dataclass(frozen=True)
class Turns:
    """How the contenders take turns: `settle` untimed steps open each turn (another's data has just left the
    caches, and a training step finds its own there), `steps` timed ones follow."""

    rounds: int
    settle: int = 1
    steps: int = 2
    seed: int = 0


class Timings(NamedTuple):
    """Seconds[N, T] of every contender, by clock."""

    wall: dict[str, Seconds]
    cpu: dict[str, Seconds]


def interleave(
    contenders: Mapping[str, Callable[[], Sample]],
    turns: Turns,
    between: Callable[[str], None] = lambda name: None,
    progress: Callable[[int], None] = lambda done: None,
) -> Timings:
    """All take turns; `between(name)` runs untimed when a turn is over, `progress(done)` after a round."""
    shape = (turns.rounds, turns.steps)
    timings = Timings(*({name: np.empty(shape) for name in contenders} for _ in range(2)))
    order = list(contenders)
    rng = np.random.default_rng(turns.seed)
    for done in range(turns.rounds):
        for name in rng.permuted(np.array(order)).tolist():
            sample = contenders[name]
            for _ in range(turns.settle):
                sample()
            for step in range(turns.steps):
                timings.wall[name][done, step], timings.cpu[name][done, step] = sample()
            between(name)
        progress(done + 1)
    return timings


def pooled(found: Sequence[Timings]) -> Timings:
    """The rounds of several measurements of the same contenders, as if they were one's."""
    first = found[0]
    wall, cpu = (
        {name: np.concatenate([timings[clock][name] for timings in found]) for name in first[clock]}
        for clock in range(len(first))
    )
    return Timings(wall, cpu)


def compare(seconds: Mapping[str, Seconds], baseline: str = "bare") -> dict[str, Comparison]:
    """Each contender against the baseline, round by round."""
    reference = seconds[baseline]
    return {
        name: Comparison(
            rounds=len(mine),
            median_ms=float(np.median(mine)) * 1e3,
            ratio=float(np.median(mine) / np.median(reference)),
            added=_interval(_added(mine, reference), np.median),
            added_mean=_interval(mine.mean(1) * 1e6 - reference.mean(1) * 1e6, np.mean),
        )
        for name, mine in seconds.items()
    }


def added_ratio(
    seconds: Mapping[str, Seconds],
    above: str,
    below: str,
    baseline: str = "bare",
    above_baseline: str = "",
) -> Interval:
    """(what `above` adds) / (what `below` adds), with the rounds resampled jointly.

    `above_baseline` replaces the baseline of the numerator: what gradwatch adds to a loop that clips already.
    """
    top = _added(seconds[above], seconds[above_baseline or baseline])
    bottom = _added(seconds[below], seconds[baseline])
    picks = _resamples(len(top))
    # What adds nothing measurable cannot be a denominator: no ratio rather than a meaningless one.
    ratios = np.median(top[picks], 1) / np.where((m := np.median(bottom[picks], 1)) > 0, m, np.nan)
    low, high = np.percentile(ratios, (2.5, 97.5))
    return Interval(float(np.median(top) / np.median(bottom)), float(low), float(high))


def beyond(
    seconds: Mapping[str, Seconds], one: str, others: Sequence[str], baseline: str = "bare"
) -> Interval:
    """µs a step: what `one` adds to the baseline, less what all `others` add to it."""
    added = [_added(seconds[name], seconds[baseline]) for name in (one, *others)]
    return _interval(added[0] - np.sum(added[1:], axis=0), np.median)


def step_ratio(
    seconds: Mapping[str, Seconds], above: str, below: str, step_ms: float, baseline: str = "bare"
) -> Interval:
    """(the step with `above`) / (the step with `below`), from what each adds to a bare step of `step_ms`.

    Whole steps compared directly vary by more than either adds.
    """
    top, bottom = (_added(seconds[name], seconds[baseline]) for name in (above, below))
    step = step_ms * 1e3
    picks = _resamples(len(top))
    ratios = (step + np.median(top[picks], 1)) / (step + np.median(bottom[picks], 1))
    low, high = np.percentile(ratios, (2.5, 97.5))
    return Interval(float((step + np.median(top)) / (step + np.median(bottom))), float(low), float(high))


def _added(mine: Seconds, reference: Seconds) -> Seconds:
    """µs[N]: in each round, the median step of one less the median step of the other."""
    added: Seconds = (np.median(mine, 1) - np.median(reference, 1)) * 1e6
    return added


def _interval(values: Seconds, statistic: Callable[..., Seconds]) -> Interval:
    low, high = np.percentile(statistic(values[_resamples(len(values))], axis=1), (2.5, 97.5))
    return Interval(float(statistic(values)), float(low), float(high))


def _resamples(rounds: int) -> NDArray[np.int64]:
    """Round indices[B, N] drawn with replacement; the same for all, so that results are reproducible."""
    return np.random.default_rng(0).integers(rounds, size=(BOOTSTRAP, rounds))
