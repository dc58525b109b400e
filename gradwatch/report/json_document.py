"""The report as JSON, for machines: every number that the page draws, but for the grids of parameters."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from gradwatch.report.chart_data import facts, table
from gradwatch.report.explained import document as incident
from gradwatch.report.run_report import Cost, RuleState, RunReport
from gradwatch.report.saved_states import document as saved_states
from gradwatch.report.track import Curve, Track
from gradwatch.runtime.json_numbers import json_ready

FORMAT = 1
_NAMES = {
    "name": "parameter",
    "low": "smallest",
    "high": "largest",
    "high_step": "largest_at_step",
    "rise": "largest_over_usual",
    "fall": "usual_over_smallest",
    "bad": "not_finite_buckets",
}


def text(reports: Sequence[RunReport]) -> str:
    """One JSON object, `runs` in it; NaN and infinities as strings or null, as elsewhere."""
    runs = [json_ready(document(one)) for one in reports]
    return json.dumps({"format": FORMAT, "runs": runs}, allow_nan=False) + "\n"


def document(report: RunReport) -> dict[str, Any]:
    """One run."""
    return {
        "run": report.name,
        "folder": report.folder,
        "about": dict(facts(report)),
        "verdict": asdict(report.verdict),
        "notes": list(report.notes),
        "accounts": list(report.accounts),
        "steps": report.steps,
        "tracks": [_track(one) for one in report.tracks],
        "incidents": [incident(one) for one in report.incidents],
        "incidents_left_out": report.incidents_left_out,
        "firing": [asdict(one) for one in report.periods],
        "rules": [_rule(one) for one in report.rules],
        "actions": [line.to_dict(report.steps) for line in report.actions],
        "cost": _cost(report.cost),
        "saved_states": saved_states(report.saved),
        "checkpoint": None
        if report.checkpoint is None
        else {**asdict(report.checkpoint), "step": report.checkpoint_step},
    }


def _track(track: Track) -> dict[str, Any]:
    parameters = table(track.parameters)
    return {
        "title": track.title,
        "optimizer": track.optimizer,
        "process": track.attempt,
        "steps": track.steps,
        "first_step": track.first_step,
        "last_step": track.last_step,
        "pruned": track.pruned,
        "bucket_steps": track.axis.width,
        "bucket_starts": list(track.axis.starts),
        "curves": {name: _curve(curve) for name, curve in track.curves.items()},
        "counts": {name: counts.tolist() for name, counts in track.counts.items()},
        "norms_recorded": track.parameters.recorded,
        "parameters": [
            dict(zip((_NAMES.get(name, name) for name in parameters), values, strict=True))
            for values in zip(*parameters.values(), strict=True)
        ],
    }


def _curve(curve: Curve) -> dict[str, Any]:
    return {
        "smallest": [None if value != value else value for value in curve.low.tolist()],
        "largest": [None if value != value else value for value in curve.high.tolist()],
        "not_finite": curve.bad.tolist(),
    }


def _rule(one: RuleState) -> dict[str, Any]:
    return asdict(one)


def _cost(cost: Cost | None) -> dict[str, Any] | None:
    return None if cost is None else {**asdict(cost), "share": cost.share, "seconds_a_step": cost.per_step}
