"""Comparison of a test's expectations with the result: the items of each that the other side lacks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradwatch.records.decision import Order
from gradwatch.records.event import Event
from gradwatch.rule_tests.load_test_file import Case, Expected
from gradwatch.rule_tests.simulate import Simulation

TOLERANCE = 1e-3  # relative, of numbers that a person wrote down
ON_REQUEST = ("pending", "repeat")
"""Kinds of events that are compared only in tests that expect one of them: most tests are about neither."""
EVENT_FIELDS = ("rule", "kind", "severity", "sites", "count", "value", "notify", "summary", "description")
ACTION_FIELDS = ("rule", "action", "shadow", "site", "count", "before", "after", "coefficient")


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of one test: the missing expected items and the unexpected ones, as `(step, fields)`.

    `events` says which list of the test each is about.
    """

    case: Case
    missing_events: tuple[Expected, ...] = ()
    missing_actions: tuple[Expected, ...] = ()
    further_events: tuple[tuple[int, Mapping[str, Any]], ...] = ()
    further_actions: tuple[tuple[int, Mapping[str, Any]], ...] = ()

    @property
    def passed(self) -> bool:
        """True if all of it came, and nothing else."""
        return not (
            self.missing_events or self.missing_actions or self.further_events or self.further_actions
        )


def compared(case: Case, simulation: Simulation) -> Outcome:
    """Match every expected item with one that came, each used once."""
    wanted = {item.fields["kind"] for item in case.events or ()}
    events = [
        (event.step, _of_event(event))
        for event in simulation.events
        if _concerned(case, event.rule) and (event.kind not in ON_REQUEST or event.kind in wanted)
    ]
    actions = [(step, _of_order(order)) for step, order in simulation.actions if _concerned(case, order.rule)]
    missing_events, further_events = _matched(case.events, events)
    missing_actions, further_actions = _matched(case.actions, actions)
    return Outcome(case, missing_events, missing_actions, further_events, further_actions)


def _concerned(case: Case, rule: str) -> bool:
    return case.only is None or rule in case.only


def _of_event(event: Event) -> dict[str, Any]:
    return {name: getattr(event, name) for name in EVENT_FIELDS} | {"sites": list(event.sites)}


def _of_order(order: Order) -> dict[str, Any]:
    return {name: getattr(order, name) for name in ACTION_FIELDS}


def _matched(
    expected: Sequence[Expected] | None, came: Sequence[tuple[int, Mapping[str, Any]]]
) -> tuple[tuple[Expected, ...], tuple[tuple[int, Mapping[str, Any]], ...]]:
    """The unmatched items of both sides; empty where nothing was to be compared."""
    if expected is None:
        return (), ()
    left, missing = list(came), []
    # Those that say most choose first, lest one that says little takes what only they could have.
    for item in sorted(expected, key=lambda item: -len(item.fields)):
        found = next((one for one in left if one[0] == item.step and _agrees(item.fields, one[1])), None)
        if found is None:
            missing.append(item)
        else:
            left.remove(found)
    return tuple(sorted(missing, key=lambda item: (item.step, item.at.line))), tuple(left)


def _agrees(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> bool:
    return not list(differences(wanted, found))


def differences(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> Iterable[str]:
    """The fields on which an item that came is not as expected."""
    return (name for name, value in wanted.items() if not _same(value, found[name]))


def _same(wanted: Any, found: Any) -> bool:
    if isinstance(wanted, float) and not isinstance(found, (bool, str)) and found is not None:
        return math.isclose(wanted, found, rel_tol=TOLERANCE)
    return bool(wanted == found)
