"""What judges a recording: a rule file with the engine of gradwatch, or a rival's check; and the alarms it gives.

A judge can be copied at any step, so that a fault is replayed from there on without the steps before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

from gradwatch.engine import Engine
from gradwatch.engine.bound_engine import BoundEngine
from gradwatch.engine.columns_needed import batches_hashed_every
from gradwatch.engine.engine_state import EngineState
from gradwatch.records.columns import BATCH_HASH
from gradwatch.records.event import Severity
from gradwatch.records.snapshot import Sites, Snapshot
from gradwatch.rules.rule_set import RuleSet
from tests.benchmarks.detection.recording import Recording


class Alarm(NamedTuple):
    """A rule begins to fire: at the Snapshot of this number, at this step, with the parameters that it names."""

    place: int
    step: int
    rule: str
    severity: Severity
    sites: tuple[str, ...] = ()
    first_cause: str = ""


class Judge(Protocol):
    """Judges Snapshots one after the other."""

    def judge(self, place: int, snapshot: Snapshot) -> Iterable[Alarm]:
        """The alarms of one step."""

    def copy(self) -> Judge:
        """A judge with what this one has learned; neither learns of the other."""


class _Bound(NamedTuple):
    """Rules bound to the sites of one optimizer, and what they have learned of it."""

    sites: Sites
    engine: BoundEngine
    state: EngineState


class RuleFile:
    """The rules of a file. What they would have done is not carried out: the recording goes on as it was made."""

    def __init__(self, ruleset: RuleSet) -> None:
        self._engine = Engine(ruleset)
        self._bound: dict[int, _Bound] = {}
        self._hashed_every = batches_hashed_every(ruleset)

    def judge(self, place: int, snapshot: Snapshot) -> Iterator[Alarm]:
        """Every rule that begins to fire; not where it is the same incident as a short while ago."""
        one = self._bound.get(snapshot.optimizer)
        if one is None or one.sites is not snapshot.sites:
            one = self._bind(snapshot.sites, one)
        if BATCH_HASH in snapshot.scalars and all(snapshot.step % every for every in self._hashed_every):
            rest = {name: value for name, value in snapshot.scalars.items() if name != BATCH_HASH}
            snapshot = replace(snapshot, scalars=rest)  # a recording has one of each step
        verdict, state = one.engine.evaluate(one.state, snapshot)
        if verdict.acting:
            _, state = one.engine.decide(state, verdict, snapshot)
        self._bound[snapshot.optimizer] = one._replace(state=state)
        for event in verdict.events:
            if event.kind == "firing" and event.notify:
                yield Alarm(place, snapshot.step, event.rule, event.severity, event.sites, event.first_cause)

    def copy(self) -> RuleFile:
        """The states are immutable: only who holds them is copied."""
        other = RuleFile.__new__(RuleFile)
        other._engine, other._bound = self._engine, dict(self._bound)
        other._hashed_every = self._hashed_every
        return other

    def _bind(self, sites: Sites, before: _Bound | None) -> _Bound:
        """The rules on these sites; what they learned of others of the same optimizer is carried over by name."""
        rules = self._engine.bind(sites)
        state = rules.init() if before is None else rules.adopt(before.state, before.engine)
        return _Bound(sites, rules, state)


def judged(judge: Judge, snapshots: Sequence[Snapshot], first: int = 0) -> list[Alarm]:
    """The alarms on Snapshots, of which the first has the number `first`."""
    return [alarm for place, one in enumerate(snapshots, first) for alarm in judge.judge(place, one)]


def alarms(ruleset: RuleSet, recording: Recording) -> list[Alarm]:
    """The alarms of a rule file on a recording, in order."""
    return judged(RuleFile(ruleset), recording.snapshots)
