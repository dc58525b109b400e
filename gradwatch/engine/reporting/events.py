"""The Event of a transition: the worst series, the first cause, and the text of the annotations."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gradwatch.engine.scores import Scored, exceeded_by, worst_first
from gradwatch.engine.series import Series
from gradwatch.records.columns import RANK_COLUMNS
from gradwatch.records.event import Event, EventKind, Severity
from gradwatch.records.snapshot import BoolArray, Snapshot
from gradwatch.rules.rule_set import Rule

NAMED = 5
"""Sites an Event names; the rest are counted."""

NOT_ONE = "no single parameter"
"""Stands for `{param}` where no parameter is apart from the others."""

_PLACEHOLDER = re.compile(r"\{(\w+)\}")
_COUNTED = re.compile(r"(\{count\} (?:parameter|module|group))s\b")


class Notice(NamedTuple):
    """Kind and text of a transition, apart from the rule and the numbers."""

    kind: EventKind
    incident: str
    involved: BoolArray
    severity: Severity
    actions: tuple[str, ...] = ()
    notify: bool = True


class Joined(NamedTuple):
    """Of a rule with a condition: the ids of the rules that hold, in words, and what those that fire are about.

    `sites` are the parameters (or groups), the worst of each rule first, `first_cause` the deepest of them, or the one
    that moved a total most.
    """

    rules: str = ""
    sites: tuple[str, ...] = ()
    first_cause: str = ""


NOTHING_JOINED = Joined()


def build_event(
    rule: Rule,
    series: Series,
    scored: Scored,
    notice: Notice,
    snapshot: Snapshot,
    rank: int,
    moved: str = "",
    joined: Joined = NOTHING_JOINED,
) -> Event:
    """The Event of one transition: the five worst series by score, their number, and the deepest one as first cause.

    `moved` is the parameter that moved a total most, "" = none; it is then the first cause. An Event of a rule with a
    condition has the sites of those `joined`.
    """
    order = worst_first(rule.detect, scored, series.depths, notice.involved)
    worst = int(order[0]) if len(order) else 0
    yardstick, score = exceeded_by(rule.detect, scored, worst)
    named = tuple(series.names[k] for k in order[:NAMED] if series.names[k])
    first = (_on_rank(series, worst, snapshot) or _deepest(series, order)) if named else moved
    event = Event(
        kind=notice.kind,
        rule=rule.id,
        detector=rule.kind,
        severity=notice.severity,
        optimizer=snapshot.optimizer,
        step=snapshot.step,
        incident=notice.incident,
        sites=named or joined.sites[:NAMED],
        count=len(order) if named else len(joined.sites),
        first_cause=first or joined.first_cause,
        value=float(scored.values[worst]) if len(scored.values) > worst else float("nan"),
        score=score,
        threshold=float(yardstick.fires_at),
        yardstick="" if scored.second is None else yardstick.kind,
        actions=notice.actions,
        notify=notice.notify,
        labels=rule.labels,
        inhibited=bool(notice.incident)
        and not notice.incident.startswith(f"{rule.id}-{snapshot.optimizer}-"),
    )
    facts = _facts(event, series, worst, snapshot, rank, moved or joined.first_cause, joined.rules)
    facts["beyond"] = yardstick.in_words(score)
    summary = rule.annotations.get("summary", "{kind} on {where}")
    description = rule.annotations.get("description", "")
    return replace(event, summary=fill(summary, facts), description=fill(description, facts))


def of_new_baselines(reason: str, rules: Sequence[str], names: Sequence[str], snapshot: Snapshot) -> Event:
    """The Event that says that baselines of these rules begin anew, for the sites `names` and what they are part of."""
    return Event(
        kind="rebaselined",
        rule="",
        detector="",
        severity="info",
        optimizer=snapshot.optimizer,
        step=snapshot.step,
        incident="",
        sites=tuple(names[:NAMED]),
        count=len(names),
        notify=False,
        summary=reason,
        description=", ".join(rules),
    )


def _deepest(series: Series, order: NDArray[np.intp]) -> str:
    """The series that backward reached first: the deepest; of equals the first in order."""
    return series.names[int(order[np.argmax(series.depths[order])])]


def fill(template: str, facts: Mapping[str, str]) -> str:
    """The template with each `{name}` replaced; no other syntax, so no template can reach an attribute.

    `{count} parameters` is `1 parameter` where that is the number.
    """
    if facts.get("count") == "1":
        template = _COUNTED.sub(r"\1", template)
    return _PLACEHOLDER.sub(lambda match: facts.get(match.group(1), match.group(0)), template)


def _facts(
    event: Event, series: Series, worst: int, snapshot: Snapshot, rank: int, moved: str, others: str
) -> dict[str, str]:
    name = event.sites[0] if event.sites else ""
    site = _site_of(series, worst, snapshot)
    of_rank = series.column in RANK_COLUMNS
    group = name if series.scope == "group" else _label(snapshot, site)
    return {
        "param": (_on_rank(series, worst, snapshot) or "no parameter")
        if of_rank
        else name or moved or NOT_ONE,
        "where": others or name or series.column,
        "group": group,
        "kind": event.detector,
        "rule": event.rule,
        "value": _number(event.value),
        "score": _number(event.score),
        "threshold": _number(event.threshold),
        "step": str(event.step),
        "rank": name.removeprefix("rank ") if of_rank else str(rank),
        "nonfinite": str(_nonfinite(snapshot, site)),
        "numel": str(int(snapshot.sites.numels.sum() if site is None else snapshot.sites.numels[site])),
        "count": str(event.count),
    }


def _on_rank(series: Series, worst: int, snapshot: Snapshot) -> str:
    """The parameter to look at on a rank that is out of line; "" where that is not known, or not about ranks."""
    found = snapshot.columns.get("rank_site") if series.column in RANK_COLUMNS else None
    site = _site_of(series, worst, snapshot)
    if found is None or site is None or not found.present[site]:
        return ""
    return snapshot.sites.names[int(found.values[site])]


def _site_of(series: Series, k: int, snapshot: Snapshot) -> int | None:
    if series.scope != "param":
        return None
    return k if series.index is None else int(series.index[k])


def _label(snapshot: Snapshot, site: int | None) -> str:
    groups = snapshot.sites.groups
    return groups[site] if site is not None and site < len(groups) else ""


def _nonfinite(snapshot: Snapshot, site: int | None) -> int:
    """NaN and Inf elements of a site, or of all sites."""
    counts = snapshot.columns.get("nonfinite")
    if counts is None:
        return 0
    return int(counts.values[counts.present].sum() if site is None else counts.values[site])


def _number(value: float) -> str:
    return f"{value:.4g}"
