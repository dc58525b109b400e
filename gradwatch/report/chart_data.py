"""The numbers that the page's script draws, as JSON: curves as lists, grids of parameters in two bytes a cell.

A cell is 0 without a value, 1 for zero, 65535 for what is not finite, else 2 + 65532 (log10 v + 46) / 85: a float32 to
0.3 %, which is finer than any colour. Above a thousand parameters neighbours in depth share a row.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradwatch.report.explained import Explained
from gradwatch.report.run_report import RunReport
from gradwatch.report.track import Axis, Curve, Grid, Parameters, Track, span
from gradwatch.runtime.printable import one_line, printable

MOST_ROWS = 1000
LONGEST_TITLE = 300
MISSING, ZERO, NOT_FINITE = 0, 1, 65535
_LOWEST, _DECADES, _CODES = -46.0, 85.0, 65532


def script_data(reports: Sequence[RunReport]) -> str:
    """JSON that may stand inside a `<script>`: no `<` in it, whatever a parameter is called."""
    document = [_run(one) for one in reports]
    return json.dumps(document, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _run(report: RunReport) -> dict[str, Any]:
    health = report.checkpoint
    return {
        "name": printable(report.name),
        "incidents": [_incident(one) for one in report.incidents],
        "periods": [
            [printable(one.rule), one.severity, one.optimizer, one.first, one.last, one.process]
            for one in report.periods
        ],
        "last_healthy": None if health is None or health.healthy else health.last_healthy_step,
        "tracks": [
            {**_track(one), "saved": report.saved.of(one.attempt, one.optimizer)} for one in report.tracks
        ],
    }


def _incident(one: Explained) -> dict[str, Any]:
    incident, event = one.incident, one.incident.event
    return {
        "name": printable(incident.name),
        "step": incident.step if event is None else event.step,
        "optimizer": incident.optimizer,
        "process": one.process,
        "rule": "" if event is None else printable(event.rule),
        "severity": "" if event is None else event.severity,
        "title": one_line(incident.title, LONGEST_TITLE),
    }


def _track(track: Track) -> dict[str, Any]:
    return {
        "title": track.title,
        "optimizer": track.optimizer,
        "process": track.attempt,
        "axis": _axis(track.axis),
        "last": track.last_step,
        "curves": {name: _curve(curve) for name, curve in track.curves.items()},
        "counts": {name: counts.tolist() for name, counts in track.counts.items() if counts.any()},
        "parameters": _parameters(track.parameters),
    }


def _axis(axis: Axis) -> dict[str, int]:
    return {"first": axis.starts[0] if axis.starts else 0, "width": axis.width, "count": len(axis.starts)}


def _curve(curve: Curve) -> dict[str, Any]:
    same = np.array_equal(curve.low, curve.high, equal_nan=True)
    return {
        "high": numbers(curve.high),
        **({} if same else {"low": numbers(curve.low)}),
        "bad": np.flatnonzero(curve.bad).tolist(),
    }


def _parameters(parameters: Parameters) -> dict[str, Any]:
    size = len(parameters.names)
    together = max(1, -(-size // MOST_ROWS))
    return {
        "axis": _axis(parameters.axis),
        "together": together,
        "grids": {name: _grid(grid, together) for name, grid in parameters.grids.items()},
        "table": table(parameters),
        "last": parameters.last_step,
        "recorded": parameters.recorded,
    }


def table(parameters: Parameters) -> dict[str, list[Any]]:
    """By column, one value per parameter: what is shown of each over the whole run."""
    grid: Grid | None = parameters.grids.get("norm")
    if grid is None:
        return {}
    usual = usual_norms(grid)
    spans = [span(column) for column in np.concatenate([grid.low, grid.high]).T]
    smallest, largest = (np.array([pair[side] for pair in spans]) for side in (0, 1))
    return {
        "name": [printable(name) for name in parameters.names],
        "group": [printable(group) for group in parameters.groups],
        "numel": list(parameters.numels),
        "usual": numbers(usual),
        "low": numbers(smallest),
        "high": numbers(largest),
        "high_step": [None if step < 0 else step for step in parameters.largest_step.tolist()],
        "rise": _ratios(largest, usual),
        "fall": _ratios(usual, smallest),
        "last": numbers(parameters.last),
        "bad": grid.bad.sum(0).tolist(),
    }


def _ratios(above: NDArray[np.float64], below: NDArray[np.float64]) -> list[float | None]:
    """`above / below`; None where either is not known, or 0."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return numbers(np.where(above > 0, above / below, np.nan))


def usual_norms(grid: Grid) -> NDArray[np.float64]:
    """Of each parameter the median over the buckets of the geometric mean of smallest and largest; NaN without one."""
    with np.errstate(invalid="ignore"):  # a damaged journal may say anything
        middle = np.sqrt(grid.low.astype(np.float64) * grid.high)
    # A column without any value would be a warning.
    known = np.isfinite(middle).any(0)
    usual = np.full(middle.shape[1], np.nan)
    usual[known] = np.nanmedian(middle[:, known], axis=0)
    return usual


def _grid(grid: Grid, together: int) -> dict[str, str]:
    """Cells by step, then row: those of one step stand together."""
    low, high, bad = grid.low, grid.high, grid.bad
    if together > 1:
        at = np.arange(0, low.shape[1], together)
        low, high = np.fmin.reduceat(low, at, axis=1), np.fmax.reduceat(high, at, axis=1)
        bad = np.logical_or.reduceat(bad, at, axis=1)
    encoded = {"high": cells(high, bad)}
    if not np.array_equal(low, high, equal_nan=True):
        encoded["low"] = cells(low, np.zeros_like(bad))
    return {name: b64encode(part.astype("<u2").tobytes()).decode() for name, part in encoded.items()}


def cells(values: NDArray[Any], bad: NDArray[np.bool_]) -> NDArray[np.uint16]:
    """Codes of values that are not negative, as the head of this file says."""
    positive = np.isfinite(values) & (values > 0)
    logs = np.log10(np.where(positive, values, 1.0).astype(np.float64))
    codes = 2 + np.rint((logs - _LOWEST) / _DECADES * _CODES).clip(0, _CODES)
    codes = np.where(positive, codes, np.where(np.isfinite(values), ZERO, MISSING))
    return np.where(bad, NOT_FINITE, codes).astype(np.uint16)


def numbers(values: NDArray[Any]) -> list[float | None]:
    """Numbers to six digits, None for what is not finite."""
    return [float(f"{value:.6g}") if np.isfinite(value) else None for value in values.tolist()]


def facts(report: RunReport) -> Mapping[str, str]:
    """Facts that identify a run, by label; what is not known is left out."""
    run = report.run
    if run is None:
        return {"folder": report.folder}
    known = {
        "script": run.script,
        "host": run.host,
        "rank": f"{report.rank} of {run.world_size}" if run.world_size > 1 else "",
        "rules": run.rules_digest[:12],
        **{name: run.versions[name] for name in ("torch", "python", "gradwatch") if name in run.versions},
        "folder": report.folder,
    }
    return {label: text for label, text in known.items() if text}
