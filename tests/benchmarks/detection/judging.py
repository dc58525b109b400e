"""A rule file judging a recording: the alarms that the engine would have given while it was made."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from gradwatch.engine import Engine
from gradwatch.engine.bound_engine import BoundEngine
from gradwatch.engine.engine_state import EngineState
from gradwatch.records.event import Severity
from gradwatch.records.snapshot import Sites
from gradwatch.rules.rule_set import RuleSet
from tests.benchmarks.detection.recording import Recording


class Alarm(NamedTuple):
    """A rule begins to fire: at the Snapshot of this number, at this step, with the parameters that it names."""

    place: int
    step: int
    rule: str
    severity: Severity
    sites: tuple[str, ...]
    first_cause: str = ""


class Bound(NamedTuple):
    """The rules bound to the sites of one optimizer, and what they have learned of it."""

    sites: Sites
    engine: BoundEngine
    state: EngineState


def alarms(ruleset: RuleSet, recording: Recording) -> list[Alarm]:
    """The alarms of all rules on a recording, in order. What rules would have done is not carried out."""
    return list(_alarms(Engine(ruleset), recording))


def _alarms(engine: Engine, recording: Recording) -> Iterator[Alarm]:
    bound: dict[int, Bound] = {}
    for place, snapshot in enumerate(recording.snapshots):
        one = bound.get(snapshot.optimizer)
        if one is None or one.sites is not snapshot.sites:
            one = _bind(engine, snapshot.sites, one)
        verdict, state = one.engine.evaluate(one.state, snapshot)
        if verdict.acting:
            _, state = one.engine.decide(state, verdict, snapshot)
        bound[snapshot.optimizer] = one._replace(state=state)
        for event in verdict.events:
            if event.kind == "firing":
                yield Alarm(place, snapshot.step, event.rule, event.severity, event.sites, event.first_cause)


def _bind(engine: Engine, sites: Sites, before: Bound | None) -> Bound:
    """The rules on these sites; what they learned of others of the same optimizer is carried over by name."""
    rules = engine.bind(sites)
    state = rules.init() if before is None else rules.adopt(before.state, before.engine)
    return Bound(sites, rules, state)
