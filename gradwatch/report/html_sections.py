"""The parts of the page that need no script: verdict, facts, incidents, rules, actions, cost."""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timezone

from gradwatch.journal.audit import Line
from gradwatch.records.event import SEVERITIES
from gradwatch.report.chart_data import facts
from gradwatch.report.explained import Explained
from gradwatch.report.incident_html import incident_html
from gradwatch.report.run_report import Cost, RuleState, RunReport
from gradwatch.report.saved_states import last_of_each, place, sentence
from gradwatch.runtime.printable import LONGEST_LABEL, one_line, printable
from gradwatch.runtime.readable_numbers import duration

OPEN_INCIDENTS = 2
MOST_SAVED = 10
LONGEST_SENTENCE = 2000
LONGEST_FACT = 2 * LONGEST_LABEL
_STATES = {
    "silent": "evaluated, did not fire",
    "no data": "never had data",
    "not armed": "its actions were off",
    "not known": "not known: the process left no account",
}


def text(value: str, limit: int = LONGEST_SENTENCE) -> str:
    """Prose from elsewhere as HTML."""
    return html.escape(one_line(value, limit)).encode("utf-8", "replace").decode()


def name(value: str) -> str:
    """A name from elsewhere as HTML."""
    return html.escape(printable(value))


def table(head: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "") -> str:
    """A table of cells that are HTML already."""
    titles = "".join(f"<th>{title}" for title in head)
    body = "".join(f"<tr>{''.join(f'<td>{cell}' for cell in row)}\n" for row in rows)
    return f'<div class="wide"><table class="{kind}"><thead><tr>{titles}<tbody>\n{body}</table></div>\n'


def verdict(report: RunReport) -> str:
    """The sentence, and what the process said of itself."""
    state = report.verdict.state.replace(" ", "-")
    notes = "".join(f"<li>{text(note)}" for note in report.notes)
    accounts = "".join(f"<li>{text(line)}" for line in report.accounts)
    return (
        f'<p class="verdict {state}">{text(report.verdict.sentence)}</p>\n'
        + (f'<ul class="notes">{notes}</ul>\n' if notes else "")
        + (f'<ul class="account">{accounts}</ul>\n' if accounts else "")
    )


def about(report: RunReport) -> str:
    """Facts that identify the run."""
    known = dict(facts(report))
    if report.run is not None and report.run.start_time > 0:
        known = {"began": when(report.run.start_time), **known}
    track = report.tracks[0] if report.tracks else None
    if track is not None and track.ended > track.began > 0:
        known["recorded"] = duration(track.ended - track.began)
    items = "".join(
        f"<div><dt>{label}<dd>{text(value, LONGEST_FACT)}</div>" for label, value in known.items()
    )
    return f'<dl class="facts">{items}</dl>\n'


def when(seconds: float) -> str:
    """A time since the epoch in UTC; "" for what no clock shows."""
    try:
        return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, OSError, ValueError):
        return ""


def incidents(report: RunReport) -> str:
    """A section for each incident, the first few of them open."""
    if not report.incidents:
        return (
            "<p>No rule fired.</p>\n"
            if not report.fired
            else f"<p>None of them is in the journal of rank {report.rank}.</p>\n"
        )
    return "".join(_incidents(report))


def _incidents(report: RunReport) -> Iterator[str]:
    # A sort that keeps the order: the first critical ones, else the first of all.
    by_severity = sorted(report.incidents, key=lambda one: not _critical(one))
    shown_open = {one.incident.name for one in by_severity[:OPEN_INCIDENTS]}
    for one in report.incidents:
        event = one.incident.event
        severity = "" if event is None else event.severity
        rule = "" if event is None else event.rule
        yield (
            f'<details class="incident {severity}"{" open" * (one.incident.name in shown_open)}><summary>'
            f'<span class="badge {severity}">{severity or "cause"}</span> step {one.incident.step:,} · '
            f"<b>{name(rule or one.incident.name)}</b> <span>{text(one.incident.title)}</span></summary>\n"
            f"{incident_html(one)}</details>\n"
        )
    if report.incidents_left_out:
        yield f"<p>{report.incidents_left_out:,} further incidents are not shown.</p>\n"


def _critical(one: Explained) -> bool:
    return one.incident.event is not None and one.incident.event.severity == "critical"


def saved(report: RunReport) -> str:
    """The states that the script took: a sentence, the last ones and the last healthy ones."""
    shown = last_of_each(report.saved, MOST_SAVED)
    rows = (
        (place(report.saved, one), one.condition, text("; ".join(one.state.reasons)) or "–") for one in shown
    )
    said = sentence(report.saved)
    return (
        f"<p>{said[:1].upper()}{said[1:]}. A state is saved where <code>optimizer.state_dict()</code> or "
        "<code>gw.state_dict()</code> is called; whether a file was made of it is not known.</p>\n"
        + table(("after step", "weights", "why"), rows)
    )


def rules(report: RunReport) -> str:
    """All rules by what they did."""
    if not report.rules:
        return "<p>The rules of this run are not known.</p>\n"
    fired = [rule for rule in report.rules if rule.state == "fired"]
    quiet = [rule for rule in report.rules if rule.state == "silent"]
    rest = [rule for rule in report.rules if rule.state not in ("fired", "silent")]
    parts = []
    if fired:
        rows = (
            (
                name(rule.rule) + ("" if rule.rank is None else f" (rank {rule.rank})"),
                badge(rule.severity),
                f"{one.times:,}",
                *one.steps,
                text(one.cause) or "–",
            )
            for rule in fired
            if (one := rule.fired) is not None
        )
        parts += ["<h3>Fired</h3>\n", table(("rule", "severity", "times", "first", "last", "cause"), rows)]
    if rest:
        said = ((name(rule.rule), badge(rule.severity), _STATES[rule.state], text(rule.why)) for rule in rest)
        parts += [
            "<h3>Say nothing: without data</h3>\n<p>The silence of these is no sign of health.</p>\n",
            table(("rule", "severity", "", "why"), said),
        ]
    if quiet:
        named = ((name(rule.rule), badge(rule.severity), name(rule.kind), name(rule.of)) for rule in quiet)
        parts += [
            f"<details><summary>{len(quiet)} rules were evaluated and did not fire</summary>\n",
            table(("rule", "severity", "kind", "of"), named),
            "</details>\n",
        ]
    return "".join(parts)


def badge(severity: str) -> str:
    """A severity in its colour."""
    known = severity if severity in SEVERITIES else ""
    return f'<span class="badge {known}">{name(severity)}</span>' if severity else ""


def actions(report: RunReport) -> str:
    """Every rule that did something, how often and how hard."""
    if not report.actions:
        return "<p>Nothing was done to the gradients, and no step was skipped.</p>\n"
    head = ("rule", "action", "times", "first", "last", "coefficient: min, median", "hardest")
    return table(head, (_action(line, report.steps) for line in report.actions))


def _action(line: Line, steps: int) -> tuple[str, ...]:
    found = line.to_dict(steps)
    least, middle = found["coefficient_min"], found["coefficient_median"]
    hardest = ""
    if line.hardest is not None:
        step, before, after = line.hardest
        shown = [("not finite" if value is None else f"{value:.4g}") for value in (before, after)]
        hardest = f"{shown[0]} → {shown[1]} at step {step:,}"
    return (
        name(line.rule),
        name(line.action) + (" (shadow)" if line.shadow else ""),
        f"{line.times:,}",
        f"{line.first_step:,}",
        f"{line.last_step:,}",
        "" if least is None else f"{least:.3g}, {middle:.3g}",
        hardest,
    )


def cost(found: Cost | None) -> str:
    """gradwatch's own time, in a sentence."""
    if found is None or not found.steps:
        return "<p>Not known: no step was recorded.</p>\n"
    share = "" if found.share is None else f", {found.share:.1%} of the {duration(found.seconds)} of the loop"
    per_step = 0.0 if found.per_step is None else found.per_step
    return (
        f"<p>{duration(found.own_seconds)} in {found.steps:,} steps{share}: {1e3 * per_step:.3g} ms a step on average, "
        f"at most {1e3 * found.largest:.3g} ms (a step whose cause is looked for is run again).</p>\n"
    )


def fired_rules(rules: Sequence[RuleState]) -> str:
    """Rules that fired, with how often."""
    return (
        ", ".join(f"{name(one.rule)} ×{one.fired.times:,}" for one in rules if one.fired is not None)
        or "none"
    )
