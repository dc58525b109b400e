"""Responses of `gradwatch serve`, each a pure function of one Fleet."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from gradwatch.endpoint.http_protocol import Content
from gradwatch.records.run_info import RunInfo
from gradwatch.runtime.printable import printable
from gradwatch.serve.ended_run_counters import Known
from gradwatch.serve.run_scanner import STATES, Fleet, Member
from gradwatch.sinks.prometheus.exposition import CONTENT_TYPE, Family, Labels, Series, render
from gradwatch.sinks.prometheus.file_sd import process_labels
from gradwatch.sinks.prometheus.final_metrics import final_families, labelled
from gradwatch.sinks.prometheus.metric_catalogue import METRICS, SERVE_METRICS
from gradwatch.sinks.prometheus.metric_values import families

JOB = "gradwatch"
FIRINGS = "gradwatch_rule_firings_total"
MOST_ENDED = 200
"""Processes whose last counters are served, the latest first: about 100 series each."""


def sd(fleet: Fleet, reach: str = "") -> Content:
    """Targets for `http_sd_configs`, with the labels of their series.

    `reach` is the name by which Prometheus reaches processes whose endpoint is open to all (default: the name of
    their own machine).
    """
    groups = [{"targets": [_target(member, reach)], "labels": _labels(member)} for member in fleet.targets()]
    return _json(groups)


def _target(member: Member, reach: str) -> str:
    address = member.address
    assert address is not None  # targets() holds only those that have one
    if address.host in ("0.0.0.0", "::"):
        return f"{reach or printable(member.node)}:{address.port}"
    return str(address)


def _labels(member: Member) -> dict[str, str]:
    return process_labels(printable(member.run_id), member.rank, member.place)


def metrics(fleet: Fleet, ended_for: float) -> Content:
    """The last counters of processes that ended in the last `ended_for` seconds, and what serve says of itself.

    They carry the labels that their process was scraped with, `job` included, so that in Prometheus (with
    `honor_labels`) the same series go on and end at their final value. What the journal does not know to the end is
    left out: a series that ends early is true, one that goes back would count everything again.
    """
    merged = {metric.name: Family(metric) for metric in METRICS}
    for member in fleet.ended_since(fleet.scanned_at - ended_for, MOST_ENDED):
        for family in _ended(member):
            merged[family.metric.name].series.extend(family.series)
    return Content(CONTENT_TYPE, render([*merged.values(), *_own(fleet)]))


def _ended(member: Member) -> Iterator[Family]:
    summary = member.summary
    if summary is None:
        return iter(())
    labels: Labels = (("job", JOB), *_labels(member).items())
    return labelled(_known(final_families(families(summary.view())), summary.known), labels)


def _known(found: Iterable[Family], known: Known) -> Iterator[Family]:
    """Families without the counters that are not known."""
    for family in found:
        is_firings = family.metric.name == FIRINGS
        if known == "all" or family.metric.kind == "gauge" or (known == "firings" and is_firings):
            yield family


def _own(fleet: Fleet) -> Iterable[Family]:
    values: dict[str, list[Series]] = {
        "gradwatch_serve_processes": [
            Series("", (("state", state),), fleet.count(state)) for state in STATES
        ],
        "gradwatch_serve_targets": [Series("", (), len(fleet.targets()))],
        "gradwatch_serve_refused_targets": [Series("", (), len(fleet.refused))],
        "gradwatch_serve_last_scan_timestamp_seconds": [Series("", (), fleet.scanned_at)],
        "gradwatch_serve_scan_duration_seconds": [Series("", (), fleet.scan_seconds)],
        "gradwatch_serve_errors_total": [Series("", (), fleet.errors)],
    }
    return [Family(metric, values[metric.name]) for metric in SERVE_METRICS]


def runs(fleet: Fleet) -> Content:
    """Every process as JSON, for scripts."""
    return _json([_document(member) for member in fleet.members])


def _document(member: Member) -> dict[str, Any]:
    summary = member.summary
    run: RunInfo | None = summary.run if summary else None
    return {
        "run_id": member.run_id,
        "rank": member.rank,
        "process": member.place,
        "state": member.state,
        "directory": str(member.folder),
        "last_sign_of_life": member.sign_of_life,
        "node": member.node,
        "script": member.script,
        "address": str(member.address) if member.address else None,
        "attempt": run.attempt if run else None,
        "world_size": run.world_size if run else None,
        "steps": summary.steps if summary else None,
        "firings": summary.firings if summary else None,
        "recent": list(summary.recent) if summary else None,
        "ended": summary.end.time if summary else None,
    }


def _json(document: Any) -> Content:
    return Content("application/json", json.dumps(document).encode("ascii") + b"\n")
