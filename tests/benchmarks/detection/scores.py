"""How well a judge did: of every fault whether, when and in whom it was found; of healthy steps how many alarms."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from statistics import median, quantiles
from typing import NamedTuple

from tests.benchmarks.detection.judging import Alarm, Judge, judged
from tests.benchmarks.detection.recording import Recording
from tests.benchmarks.detection.replayed import REPLAYED, Placed, Replayed, placed

MakeJudge = Callable[[], Judge]
NAMED_WITHIN = 5
"""Steps after the first alarm in which a parameter may be named."""
ONCE, LASTING = 3, 1
"""Places of a recording at which a fault of one step, and one that lasts, is replayed."""


class Outcome(NamedTuple):
    """One fault. `delay` in steps, None = not found; `named` the parameter named first, `right` if it is at fault."""

    fault: str
    training: str
    delay: int | None
    rule: str = ""
    named: str = ""
    right: bool | None = None


@dataclass
class Scores:
    """All that is counted of one judge. `false_alarms` by rule and severity, of `healthy_steps` steps."""

    outcomes: list[Outcome] = field(default_factory=list)
    false_alarms: Counter[tuple[str, str]] = field(default_factory=Counter)
    places: Counter[tuple[str, str]] = field(default_factory=Counter)
    healthy_steps: int = 0

    def add(self, other: Scores) -> None:
        """Take what was counted elsewhere."""
        self.outcomes += other.outcomes
        self.false_alarms += other.false_alarms
        self.places += other.places
        self.healthy_steps += other.healthy_steps

    def per_thousand(self, severities: Iterable[str] = ("warning", "critical")) -> float:
        """False alarms per 1,000 healthy steps."""
        wanted = set(severities)
        count = sum(n for (_, severity), n in self.false_alarms.items() if severity in wanted)
        return 1000 * count / max(1, self.healthy_steps)

    def by_fault(self) -> Mapping[str, Sequence[Outcome]]:
        """The outcomes of every fault."""
        found: dict[str, list[Outcome]] = {}
        for one in self.outcomes:
            found.setdefault(one.fault, []).append(one)
        return found


class Row(NamedTuple):
    """One fault of one judge in numbers; None = nothing to count."""

    count: int
    recall: float
    median_delay: float | None
    p90_delay: float | None
    right: float | None


def row(outcomes: Sequence[Outcome]) -> Row:
    """The numbers of some outcomes."""
    delays = sorted(one.delay for one in outcomes if one.delay is not None)
    named = [one.right for one in outcomes if one.right is not None]
    p90 = None if not delays else quantiles(delays, n=10, method="inclusive")[-1] if delays[1:] else delays[0]
    return Row(
        len(outcomes),
        len(delays) / max(1, len(outcomes)),
        median(delays) if delays else None,
        p90,
        sum(named) / len(named) if named else None,
    )


def is_alarm(alarm: Alarm) -> bool:
    """True of what somebody is alerted by: info is not."""
    return alarm.severity != "info"


def named_by(alarm: Alarm) -> str:
    """The parameter that an alarm names first; of the total that which moved it most."""
    return alarm.sites[0] if alarm.sites else alarm.first_cause


def outcome(
    fault: str, training: str, onset: int, horizon: int, culprits: frozenset[str], found: Sequence[Alarm]
) -> Outcome:
    """What the alarms since the onset say of a fault."""
    alarms = [one for one in found if is_alarm(one) and onset <= one.step < onset + horizon]
    if not alarms:
        return Outcome(fault, training, None)
    first = min(alarms, key=lambda one: one.step)
    soon = [one for one in alarms if one.step <= first.step + NAMED_WITHIN]
    naming = sorted((one for one in soon if named_by(one)), key=lambda one: one.step)
    named = named_by(naming[0]) if naming else ""
    right = named in culprits if culprits else None
    return Outcome(fault, training, first.step - onset, first.rule, named, right)


# -- healthy trainings, and faults replayed on them -----------------------------------------------------------


def healthy(make: MakeJudge, recording: Recording) -> tuple[Scores, list[Alarm]]:
    """False alarms, per optimizer and step one of a rule however many parameters it names."""
    alarms = judged(make(), recording.snapshots)
    scores = Scores(healthy_steps=max((one.step for one in recording.snapshots), default=-1) + 1)
    for alarm in alarms:
        scores.false_alarms[alarm.rule, alarm.severity] += 1
        scores.places[alarm.rule, recording.key.training] += 1
    return scores, alarms


def plan(recording: Recording, faults: Iterable[Replayed] = REPLAYED.values()) -> list[Placed]:
    """Where faults are replayed in a recording: the same for every judge."""
    found = []
    for fault in faults:
        random = Random(f"{recording.key} {fault.name}")
        for _ in range(ONCE if fault.steps == 1 else LASTING):
            one = placed(fault, recording.snapshots, random)
            found += [] if one is None else [one]
    return sorted(found, key=lambda one: one.place)


def replayed(
    make: MakeJudge, recording: Recording, faults: Sequence[Placed], usual: Sequence[Alarm]
) -> Scores:
    """What a judge finds of faults replayed on a healthy recording; an alarm it gave without them does not count."""
    judge, at, scores = make(), 0, Scores()
    before = {(one.place, one.rule) for one in usual}
    for one in faults:
        judged(judge, recording.snapshots[at : one.place], at)
        at = one.place
        found = judged(judge.copy(), one.snapshots(recording.snapshots), at)
        new = [alarm for alarm in found if (alarm.place, alarm.rule) not in before]
        onset = recording.snapshots[at].step
        scores.outcomes.append(
            outcome(one.fault.name, recording.key.training, onset, one.fault.steps, one.culprits, new)
        )
    return scores


# -- live faults ------------------------------------------------------------------------------------------------


def live(make: MakeJudge, recording: Recording, usual: Iterable[Alarm] = ()) -> Scores:
    """What a judge finds of a fault that was in the loop.

    Neither alarms of before count, nor one that the same rule gives at the same step of the healthy training.
    """
    before = {(one.step, one.rule) for one in usual}
    found = [
        one
        for one in judged(make(), recording.snapshots)
        if one.place >= recording.first and (one.step, one.rule) not in before
    ]
    key, horizon = recording.key, recording.horizon
    return Scores([outcome(key.fault, key.training, recording.onset, horizon, recording.culprits, found)])
