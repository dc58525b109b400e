"""What the outcomes come to: a table to read, and the claim they must bear out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from tests.benchmarks.rescue.cells import Cell, Outcome, relative
from tests.benchmarks.rescue.faults import FAULTS
from tests.benchmarks.rescue.guards import GUARDS
from tests.benchmarks.rescue.trainings import TRAININGS

RESCUED = 1.02
"""A final loss up to so many times that of the healthy run is none the worse; one batch left out costs 0.005."""

Found = Mapping[Cell, Outcome]
Rows = list[list[str]]


def healthy(cell: Cell) -> Cell:
    """The run that another is measured by: the same, but that nothing happened and nobody guarded it."""
    return cell._replace(fault="none", guard="none")


def broken_claims(found: Found) -> list[str]:
    """One sentence for every run that did not go as its guard promises; empty where all did."""
    said = []
    for cell, outcome in sorted(found.items()):
        guard, fault = GUARDS[cell.guard](), FAULTS[cell.fault]
        if not guard.promises(fault):
            continue
        where = f"{guard.title} on {TRAININGS[cell.training].title}, {fault.title}, seed {cell.seed}"
        ratio = relative(outcome, found[healthy(cell)])
        if outcome.stopped or not ratio <= RESCUED:
            said.append(f"{where}: the loss ended at {ratio:.3f} times the healthy run's, not {RESCUED:g}")
        if fault.healthy and outcome.interventions:
            said.append(f"{where}: {outcome.interventions} interventions where nothing was wrong")
    return said


def whole(found: Found, guards: Sequence[str]) -> Rows:
    """One row per training and fault; a cell is the loss over the healthy one's, and the interventions."""
    rows = [["training", "fault", *(GUARDS[name].title for name in guards)]]
    for training in TRAININGS:
        for fault in FAULTS:
            here = [_pick(found, guard, fault, training) for guard in guards]
            if any(here):
                rows.append(
                    [TRAININGS[training].title, FAULTS[fault].title, *(_cell(found, one) for one in here)]
                )
    return rows


def summary(found: Found, guards: Sequence[str]) -> Rows:
    """One row per fault; a cell is the worst loss of all trainings, and the interventions of all of them."""
    rows = [["", *(GUARDS[name].title for name in guards)]]
    for fault in FAULTS:
        here = [_pick(found, guard, fault) for guard in guards]
        if any(here):
            rows.append([FAULTS[fault].title, *(_cell(found, one) for one in here)])
    return rows


def _pick(found: Found, guard: str, fault: str, training: str | None = None) -> list[Outcome]:
    return [
        outcome
        for cell, outcome in found.items()
        if (cell.guard, cell.fault) == (guard, fault) and training in (None, cell.training)
    ]


def _cell(found: Found, outcomes: list[Outcome]) -> str:
    if not outcomes:
        return "–"
    worst = max(relative(outcome, found[healthy(outcome.cell)]) for outcome in outcomes)
    loss = "lost" if worst == math.inf else f"{worst:.2f}"
    stopped = ", stopped" if any(outcome.stopped for outcome in outcomes) else ""
    return f"{loss} ({sum(outcome.interventions for outcome in outcomes)}{stopped})"


def render(rows: Rows, markdown: bool) -> str:
    """The table, for people or as Markdown."""
    if markdown:
        head, *body = rows
        lines = [head, ["---"] * len(head), *body]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
