"""Firings of two rule files compared, and how often healthy runs are alarmed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from gradwatch.backtest.outcome import PlacedEvent, RulesOutcome, RunBacktest
from gradwatch.journal.entries import event_document

Key = tuple[int, int, str, int]
OF_ACTIONS = "failed"
"""The kind of Events that are not of rules: an action could not be carried out."""


@dataclass(frozen=True, slots=True)
class Differences:
    """`same`: all Events are equal, byte for byte; else what fires on one side only."""

    same: bool
    only_new: tuple[PlacedEvent, ...]
    only_old: tuple[PlacedEvent, ...]


@dataclass(frozen=True, slots=True)
class RuleFirings:
    """One rule over all runs: how often it fired by the new rules (`new`) and by the others, where first, and in words.

    Nothing is counted on a side whose file has no such rule: None.
    """

    rule: str
    severity: str
    new: int
    old: int
    runs: int
    first: PlacedEvent


def firings(outcome: RulesOutcome) -> list[PlacedEvent]:
    """The Events at which a rule begins to fire and says so."""
    return [one for one in outcome.events if one.event.kind == "firing" and one.event.notify]


def quiet(outcome: RulesOutcome) -> Counter[str]:
    """Number of times each rule began to fire and did not say so: its incident is reported already."""
    return Counter(
        one.event.rule for one in outcome.events if one.event.kind == "firing" and not one.event.notify
    )


def alarms(outcome: RulesOutcome) -> int:
    """Firings of rules that are more than information."""
    return sum(one.event.severity != "info" for one in firings(outcome))


def differences(one: RunBacktest) -> Differences:
    """Firings by the new rules and not by the others, at the same step of the same optimizer; and the reverse."""
    new, old = firings(one.outcome), firings(one.compared)
    keys_new, keys_old = set(map(_key, new)), set(map(_key, old))
    return Differences(
        _documents(one.outcome) == _documents(one.compared),
        tuple(each for each in new if _key(each) not in keys_old),
        tuple(each for each in old if _key(each) not in keys_new),
    )


def _key(one: PlacedEvent) -> Key:
    event = one.event
    return one.process, event.optimizer, event.rule, event.step


def _documents(outcome: RulesOutcome) -> list[str]:
    """The Events of rules as text."""
    return [
        json.dumps([one.process, event_document(one.event)])
        for one in outcome.events
        if one.event.kind != OF_ACTIONS
    ]


def by_rule(runs: Sequence[RunBacktest]) -> list[RuleFirings]:
    """The rules that fired on either side, critical ones first, then by how often they fire."""
    found: dict[str, RuleFirings] = {}
    for one in runs:
        sides = firings(one.outcome), firings(one.compared)
        for rule in dict.fromkeys(each.event.rule for side in sides for each in side):
            new, old = ([each for each in side if each.event.rule == rule] for side in sides)
            first = (new or old)[0]
            known = found.get(rule, RuleFirings(rule, first.event.severity, 0, 0, 0, first))
            found[rule] = RuleFirings(
                rule,
                known.severity,
                known.new + len(new),
                known.old + len(old),
                known.runs + bool(new),
                known.first if known.new or not new else first,
            )
    return sorted(found.values(), key=lambda one: (one.severity != "critical", -one.new, -one.old, one.rule))


def per_thousand(count: int, steps: int) -> float:
    """Alarms per 1,000 steps."""
    return 1000 * count / steps if steps else 0.0
