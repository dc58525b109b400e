"""Scores as Markdown, and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tests.benchmarks.detection.faults import LIVE
from tests.benchmarks.detection.replayed import REPLAYED
from tests.benchmarks.detection.scores import Scores, row

ABSENT = "–"
Cells = list[list[str]]


def markdown(scores: Mapping[str, Scores], ours: Sequence[str], by_rule: bool) -> str:
    """Every table; `by_rule`: also which rule gives which false alarms, in which training."""
    parts = [("False alarms on healthy steps", _false_alarms(scores))]
    for name in ours:
        parts.append((f"{name}: every fault", _detailed(scores[name])))
        if by_rule:
            parts.append((f"{name}: false alarms by rule", _by_rule(scores[name])))
    if len(scores) > 1:
        parts.append(("Recall beside others", _beside(scores)))
    return "\n\n".join(f"### {title}\n\n{_table(cells)}" for title, cells in parts)


def _table(cells: Cells) -> str:
    header, *rest = cells
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rest]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _faults(scores: Mapping[str, Scores]) -> list[str]:
    known = {one.fault for each in scores.values() for one in each.outcomes}
    return [fault for fault in (*LIVE, *REPLAYED) if fault in known]


def _false_alarms(scores: Mapping[str, Scores]) -> Cells:
    cells = [["judge", "healthy steps", "per 1,000", "critical", "warning", "info"]]
    for name, one in scores.items():
        counts = [
            sum(n for (_, kind), n in one.false_alarms.items() if kind == severity)
            for severity in ("critical", "warning", "info")
        ]
        cells.append([name, f"{one.healthy_steps:,}", f"{one.per_thousand():.2f}", *map(str, counts)])
    return cells


def _by_rule(scores: Scores) -> Cells:
    cells = [["rule", "severity", "alarms", "per 1,000", "trainings"]]
    for (rule, severity), count in scores.false_alarms.most_common():
        where = ", ".join(f"{place} {n}" for (one, place), n in scores.places.most_common() if one == rule)
        cells.append([rule, severity, str(count), f"{1000 * count / scores.healthy_steps:.3f}", where])
    return cells


def _detailed(scores: Scores) -> Cells:
    cells = [["fault", "runs", "recall", "delay, median", "p90", "culprit right"]]
    found = scores.by_fault()
    for fault in _faults({"": scores}):
        one = row(found[fault])
        cells.append(
            [
                fault,
                str(one.count),
                f"{one.recall:.2f}",
                *(ABSENT if value is None else f"{value:.0f}" for value in (one.median_delay, one.p90_delay)),
                ABSENT if one.right is None else f"{one.right:.2f}",
            ]
        )
    every = row(scores.outcomes)
    right = ABSENT if every.right is None else f"{every.right:.2f}"
    cells.append(["all", str(every.count), f"{every.recall:.2f}", "", "", right])
    return cells


def _beside(scores: Mapping[str, Scores]) -> Cells:
    by_fault = {name: one.by_fault() for name, one in scores.items()}
    cells = [["fault", *scores]]
    for fault in _faults(scores):
        cells.append([fault, *(f"{row(found.get(fault, ())).recall:.2f}" for found in by_fault.values())])
    cells.append(["all", *(f"{row(one.outcomes).recall:.2f}" for one in scores.values())])
    cells.append(["false alarms per 1,000", *(f"{one.per_thousand():.2f}" for one in scores.values())])
    return cells


def payload(scores: Mapping[str, Scores], by_rule: bool) -> dict[str, Any]:
    """The same as JSON, with every outcome on its own where that may be looked at."""
    return {
        name: {
            "healthy_steps": one.healthy_steps,
            "false_alarms_per_1000": one.per_thousand(),
            "false_alarms": [[*key, n] for key, n in one.false_alarms.most_common()] if by_rule else None,
            "faults": {fault: row(outcomes)._asdict() for fault, outcomes in one.by_fault().items()},
            "outcomes": [each._asdict() for each in one.outcomes] if by_rule else None,
        }
        for name, one in scores.items()
    }
