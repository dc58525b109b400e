"""A rule file of thresholds that were made of healthy runs, with the evidence in comments."""

from __future__ import annotations

import json
from collections.abc import Iterator

from gradwatch.backtest.firings import per_thousand
from gradwatch.backtest.tuning import HALF, Tuned
from gradwatch.records.columns import is_scalar, scalar_name
from gradwatch.runtime.printable import one_line, plural, printable

LONGEST_LINE = 300


def text(tuned: Tuned, base: str, budget: float) -> str:
    """The file, which extends `base`, a pack or a path."""
    return "\n".join(_lines(tuned, base, budget)) + "\n"


def _lines(tuned: Tuned, base: str, budget: float) -> Iterator[str]:
    before, after = sum(tuned.before.values()), sum(tuned.after.values())
    yield f"# Made by `gradwatch tune` of {plural(tuned.runs, 'healthy run')}, {tuned.steps:,} steps, for at most"
    yield f"# {budget:g} false alarms per 1,000 steps."
    yield f"#   before: {_rate(before, tuned.steps)}"
    yield f"#   now:    {_rate(after, tuned.steps)}; {tuned.allowed:,} would be allowed (95 %)"
    if tuned.runs == 1:
        yield "#   One run only: how these thresholds do on a run that they were not made of is not known."
    elif tuned.held_out is None:
        yield "#   How these thresholds do on a run that they were not made of is not known:"
        yield f"#           {HALF}"
    else:
        yield "#   thresholds made of one half of the runs, alarms counted on the other:"
        yield f"#           {_rate(tuned.held_out, tuned.steps)}"
    for rule, why in tuned.not_judged.items():
        yield f"# Not judged on all of it: {printable(rule)}: {one_line(why, LONGEST_LINE)}"
    yield "version: 1"
    yield f"extends: [{json.dumps(base)}]"
    if tuned.thresholds:
        yield "rules:"
    for rule in dict.fromkeys(one.rule for one in tuned.thresholds):
        keys = [one for one in tuned.thresholds if one.rule == rule]
        counts = f"{plural(tuned.before.get(rule, 0), 'false alarm')} before, {tuned.after.get(rule, 0)} now"
        yield f"  {json.dumps(rule)}:"
        yield f"    # {counts}"
        for one in keys:
            event, detector = one.worst.event, tuned.ruleset.rule(rule).detect
            where = ", ".join(event.sites[:1]) or event.first_cause or of_step(detector.columns[0])
            furthest = "lowest" if detector.comparison == "below" else "highest"
            yield (
                f"    # {one.key} was {one.was:g}; the {furthest} score was {event.score:.4g}, "
                f"at step {event.step:,} of {printable(one.run)} ({printable(where)})"
            )
        yield f"    detect: {{{', '.join(f'{one.key}: {_number(one.now)}' for one in keys)}}}"


def of_step(column: str) -> str:
    """The name of what a step has one value of: a column of gradients is their total."""
    return scalar_name(column) if is_scalar(column) and column != "total_norm" else "the total"


def _rate(count: int, steps: int) -> str:
    return f"{plural(count, 'false alarm')} ({per_thousand(count, steps):.2f} per 1,000 steps)"


def _number(value: float) -> str:
    """As YAML 1.2 reads a float: with a point before an exponent."""
    shown = f"{value:g}"
    mantissa, exponent, power = shown.partition("e")
    return shown if not exponent or "." in mantissa else f"{mantissa}.0e{power}"
