"""The report in Markdown, for an issue, a wiki or a terminal: numbers in place of pictures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from gradwatch.incidents.incident_page import markdown
from gradwatch.report.chart_data import facts, table
from gradwatch.report.explained import page as incident
from gradwatch.report.run_report import RunReport
from gradwatch.report.saved_states import last_of_each, place
from gradwatch.report.track import Curve, Track, span
from gradwatch.runtime.readable_numbers import number

ROWS = 10
"""Stretches of steps in the table of a track, and parameters named."""


def page(reports: Sequence[RunReport]) -> str:
    """One report after the other."""
    return markdown(line for one in reports for line in lines(one))


def lines(report: RunReport) -> Iterator[str]:
    """One report, line by line."""
    yield from (f"# {report.name}", "", f"**{report.verdict.sentence}**", "")
    yield from (f"- {line}" for line in (*report.notes, *report.accounts))
    yield from (f"- {label}: {value}" for label, value in facts(report).items())
    yield ""
    for track in report.tracks:
        yield from _timeline(track)
        yield from _parameters(track)
    for one in report.incidents:
        yield from incident(one)
    if report.incidents_left_out:
        yield from (f"{report.incidents_left_out:,} further incidents are not shown.", "")
    yield from _saved(report)
    yield from _rules(report)
    yield from _cost(report)


def _timeline(track: Track) -> Iterator[str]:
    yield from (f"## {track.title}: {track.steps:,} steps", "")
    yield from _head("steps", "total norm", "as applied", "loss", "skipped", "made smaller")
    parts = np.array_split(np.arange(len(track.axis.starts)), min(ROWS, len(track.axis.starts)))
    for part in parts:
        first, last = track.axis.starts[part[0]], track.axis.starts[part[-1]] + track.axis.width - 1
        curves = (
            _range(track.curves.get(name), part) for name in ("total_norm", "total_norm_applied", "loss")
        )
        clipped = sum(int(track.counts[name][part].sum()) for name in ("clipped", "clipped_by_script"))
        skipped = int(track.counts["skipped"][part].sum())
        yield _row(f"{first:,}–{min(last, track.last_step):,}", *curves, f"{skipped:,}", f"{clipped:,}")
    yield ""


def _range(curve: Curve | None, part: NDArray[np.int64]) -> str:
    if curve is None:
        return ""
    low, high = span(curve.low[part])[0], span(curve.high[part])[1]
    said = "" if np.isnan(low) else f"{low:.4g} … {high:.4g}"
    return f"{said} not finite".strip() if curve.bad[part].any() else said


def _parameters(track: Track) -> Iterator[str]:
    shown = table(track.parameters)
    if not shown:
        return
    rows = [dict(zip(shown, values, strict=True)) for values in zip(*shown.values(), strict=True)]
    rows.sort(key=lambda one: (-one["bad"], -max(one["rise"] or 0.0, one["fall"] or 0.0)))
    yield from (f"### Parameters furthest from their usual norm ({len(rows):,} in all)", "")
    yield from _head("parameter", "smallest", "usual norm", "largest", "at step", "not finite")
    for one in rows[:ROWS]:
        norms = (_number(one[name]) for name in ("low", "usual", "high"))
        at = "" if one["high_step"] is None else f"{one['high_step']:,}"
        yield _row(f"`{one['name']}`", *norms, at, "yes" if one["bad"] else "")
    yield ""


def _number(value: float | None) -> str:
    return "" if value is None else number(value)


def _saved(report: RunReport) -> Iterator[str]:
    if not report.saved.taken:
        return
    yield from (f"## Saved states: {report.saved.taken:,}", "")
    yield from _head("after step", "weights", "why")
    for one in last_of_each(report.saved, ROWS):
        yield _row(place(report.saved, one), one.condition, "; ".join(one.state.reasons))
    yield ""


def _rules(report: RunReport) -> Iterator[str]:
    yield from ("## Rules", "")
    if report.fired:
        yield from _head("fired", "severity", "times", "first", "last", "cause")
        for rule in report.fired:
            if (one := rule.fired) is not None:
                on = "" if rule.rank is None else f" (rank {rule.rank})"
                steps = f"{one.times:,}", *one.steps
                yield _row(f"`{rule.rule}`{on}", rule.severity, *steps, one.cause or "–")
        yield ""
    else:
        yield from ("No rule fired.", "")
    for rule in report.rules:
        if rule.state in ("no data", "not armed"):
            yield f"- {rule.state}: `{rule.rule}`: {rule.why}"
    for state, said in (
        ("silent", "evaluated, and did not fire"),
        ("not known", "not known whether they had data"),
    ):
        names = [f"`{rule.rule}`" for rule in report.rules if rule.state == state]
        if state == "not known" and len(names) == len(report.rules) > 1:  # killed: it has left no account
            yield f"- all {len(names)} rules: {said}"
        elif names:
            yield f"- {len(names)} {said}: {', '.join(names)}"
    yield ""


def _cost(report: RunReport) -> Iterator[str]:
    if report.cost is not None and report.cost.share is not None:
        yield f"gradwatch's own cost: {report.cost.share:.1%} of the time of the loop."
        yield ""


def _head(*titles: str) -> Iterator[str]:
    yield _row(*titles)
    yield _row(*(["---"] * len(titles)))


def _row(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', '¦') for cell in cells)} |"
