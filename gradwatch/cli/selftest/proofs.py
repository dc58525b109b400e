"""Result of a selftest: for each fault the rule that found it, what was done, what /metrics and an alert say."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradwatch.journal import JournalReader
from gradwatch.journal.entries import EventsEntry
from gradwatch.launch.selftest_faults import FAULTS, RESULTS
from gradwatch.rules.rule_set import RuleSet
from gradwatch.runtime.printable import plural

ONE_RANK = "one rank only"
"""Why a fault of another rank is not injected."""
TITLES = {
    "nan": "a NaN in a gradient",
    "inf": "an Inf in a gradient",
    "spike": "all gradients × 10,000",
    "vanishing": "a layer's gradient × 1e-9",
    "freeze": "a layer's gradient × 0",
    "rank": "the gradients of rank 1 × 1,000",
}


@dataclass(frozen=True, slots=True)
class Proof:
    """One fault. `why` says why it was not injected ("" = it was); `rules` fired, and `actions` were done.

    `metric`: /metrics shows the firings; None where it was not looked at. `late` is how many steps the first rule took.
    """

    fault: str
    why: str = ""
    parameter: str = ""
    step: int = -1
    late: int = 0
    rules: tuple[str, ...] = ()
    actions: tuple[str, ...] = ()
    metric: bool | None = None
    stopped: bool = False

    @property
    def found(self) -> bool:
        """True if a rule has fired."""
        return bool(self.rules)


def read_results(folder: Path) -> dict[str, Any]:
    """Document that the script's process has written; empty where it did not come so far."""
    try:
        found: dict[str, Any] = json.loads((folder / RESULTS.format(0)).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found


def proofs(documents: Sequence[Mapping[str, Any]], ruleset: RuleSet, why_not: str) -> list[Proof]:
    """One for each of FAULTS; `documents` are those of all processes that took part, with their run's folder ("run").

    `why_not` is said of faults that none of them came to.
    """
    by_fault = {
        one["fault"]: (one, Path(document["run"])) for document in documents for one in document["results"]
    }
    world = max((document.get("world_size", 1) for document in documents), default=1)
    found = []
    for fault in FAULTS:
        one, run = by_fault.get(fault.name, (None, Path()))
        if fault.name == "rank" and world < 2:
            found.append(Proof(fault.name, why=ONE_RANK))
        elif one is None:
            found.append(Proof(fault.name, why=why_not))
        elif one["ended"]:
            found.append(_measured(one))
        else:
            found.append(_ended_by(one, ruleset, run))
    return found


def _measured(one: Mapping[str, Any]) -> Proof:
    rules, scraped = tuple(one["fired"]), one["scraped"]
    first = one["first_fired"]
    return Proof(
        one["fault"],
        parameter=one["parameter"],
        step=one["step"],
        late=0 if first is None else first - one["step"] - 1,
        rules=rules,
        actions=tuple(sorted(one["actions"])),
        metric=None if scraped is None or not rules else set(rules) <= set(scraped),
    )


def _ended_by(one: Mapping[str, Any], ruleset: RuleSet, run: Path) -> Proof:
    """A fault during which the process ended: what its journal has of it, as where a rule says stop."""
    fired: dict[str, int] = {}
    for path in sorted(run.glob("rank0-*.gwj"))[-1:]:
        for entry in JournalReader(path).entries():
            if isinstance(entry, EventsEntry):
                for event in entry.events:
                    if event.kind == "firing" and event.step >= one["step"]:
                        fired.setdefault(event.rule, event.step)
    if not fired:
        return Proof(one["fault"], why="the script ended while it lasted; let it take more steps")
    does = {action.name for rule in fired for action in ruleset.rule(rule).do}
    late = min(fired.values(), default=one["step"]) - one["step"]
    return Proof(
        one["fault"], "", one["parameter"], one["step"], late, tuple(fired), tuple(sorted(does)), None, True
    )


def not_reached(document: Mapping[str, Any], seconds: float) -> str:
    """Reason why the faults that are left were not injected."""
    if not document:
        return "no step was taken"
    steps = plural(int(document["steps"]), "step")
    if document["done"]:
        return f"{steps} took the {seconds:.0f} s there were: give more, --seconds {4 * seconds:.0f}"
    return f"the script ended after {steps}; let it take more"
