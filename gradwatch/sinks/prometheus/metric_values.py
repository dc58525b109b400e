"""Metric families made of what the Prometheus sink knows: one reader per row of the catalogue.

The text of a scrape, the Collector and the status page are all made from a `View`, so they cannot disagree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from gradwatch.records.record import Record
from gradwatch.records.run_info import RunInfo
from gradwatch.runtime.printable import distinct, printable
from gradwatch.sinks.parameter_selection import Chosen
from gradwatch.sinks.prometheus.exposition import Block, Family, Labels, Lines, Series, number
from gradwatch.sinks.prometheus.metric_catalogue import METRICS, Metric
from gradwatch.sinks.prometheus.run_totals import Histogram, RunTotals

Value = tuple[tuple[str, ...], float]
"""Label values in the order of `Metric.labels`, and the number."""


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Labels and names that stay the same from scrape to scrape, computed once per choice of parameters.

    `lines` are the encoded series of `gradwatch_param_grad_norm`; `shown` are (name, group) of those chosen;
    `group_of[S]` is each site's index into `groups` (printable names), −1 for modules and parameters without a group;
    `params` counts parameters.
    """

    chosen: Chosen
    lines: Lines
    shown: tuple[tuple[str, str], ...]
    groups: tuple[str, ...]
    group_of: NDArray[np.intp]
    params: int

    @classmethod
    def of(cls, chosen: Chosen, optimizer: str) -> Layout:
        """Lay out one optimizer; `optimizer` is its label, "" to leave that label out."""
        sites = chosen.sites
        labels = sites.groups or ("",) * len(sites)
        named = sorted({label for label in labels if label})
        codes = {label: i for i, label in enumerate(named)}
        pairs = zip(labels, sites.kinds, strict=True)
        indices = (codes.get(label, -1) if kind == "param" else -1 for label, kind in pairs)
        shown_groups = distinct(named)
        names = distinct(sites.names[i] for i in chosen.indices)
        groups = [shown_groups[codes[labels[i]]] if labels[i] else "" for i in chosen.indices]
        shown = tuple(zip(names, groups, strict=True))
        extra: Labels = (("optimizer", optimizer),) if optimizer else ()
        rows = [(("param", name), ("group", group), *extra) for name, group in shown]
        return cls(
            chosen,
            Lines("gradwatch_param_grad_norm", rows),
            shown,
            tuple(shown_groups),
            np.fromiter(indices, np.intp, len(sites)),
            sites.kinds.count("param"),
        )


@dataclass(frozen=True, slots=True)
class OptimizerView:
    """One optimizer at one moment: `label` as `optimizer_labels` says; `columns` of single parameters."""

    label: str
    run_totals: RunTotals
    layout: Layout | None = None
    columns: tuple[Value, ...] = ()
    columns_left_out: int = 0


NO_OPTIMIZER = "none"
"""Label `optimizer` of what no optimizer stands behind: weights moved by the script's own code, observed only."""


def optimizer_labels(totals_by_index: Mapping[int, RunTotals]) -> dict[int, str]:
    """The label `optimizer` of each total: its index as text, "" where it is the only one.

    "none" where no optimizer steps there (and of several such "none-" and the index).
    """
    observed = sum(run_totals.observed_only for run_totals in totals_by_index.values())
    labels = {}
    for index, run_totals in totals_by_index.items():
        if run_totals.observed_only:
            labels[index] = NO_OPTIMIZER if observed == 1 else f"{NO_OPTIMIZER}-{index}"
        else:
            labels[index] = str(index) if len(totals_by_index) > 1 else ""
    return labels


Outcome = Literal["finished", "stopped", "failed", "died"]


def outcome_of(ended: str, stopped: bool) -> Outcome:
    """The outcome of a process that closed in order: `ended` as its account has it, `stopped` if a rule stopped it."""
    if stopped or ended == "stopped":
        return "stopped"
    return "failed" if ended == "failed" else "finished"


@dataclass(frozen=True, slots=True)
class RunEnd:
    """The ending of a process of a run, and its time (Unix seconds)."""

    outcome: Outcome
    time: float


@dataclass(frozen=True, slots=True)
class View:
    """Everything a scrape shows, copied at one moment; `end` None while the process runs."""

    run: RunInfo
    optimizers: tuple[OptimizerView, ...]
    errors: Mapping[str, int] = field(default_factory=dict)
    up: Mapping[str, bool] = field(default_factory=dict)
    end: RunEnd | None = None
    inactive: Mapping[str, str] = field(default_factory=dict)
    process: Mapping[str, int] = field(default_factory=dict)
    last_reload_successful: bool = True


def families(view: View) -> Iterator[Family]:
    """Every family of the catalogue, in its order; those that have nothing to show are empty."""
    for metric in METRICS:
        family = Family(metric)
        if metric.name == "gradwatch_param_grad_norm":
            family.blocks.extend(block for each in view.optimizers for block in _param_block(each))
        elif not metric.per_optimizer:
            values = _OF_PROCESS[metric.name](view)
            family.series.extend(Series("", _labels(metric, texts), value) for texts, value in values)
        else:
            for each in view.optimizers:
                family.series.extend(_of_optimizer(metric, each))
        yield family


def _of_optimizer(metric: Metric, view: OptimizerView) -> Iterator[Series]:
    extra: Labels = (("optimizer", view.label),) if view.label else ()
    if metric.kind == "histogram":
        yield from _histogram(_HISTOGRAMS[metric.name](view.run_totals), extra)
        return
    for texts, value in _OF_OPTIMIZER[metric.name](view):
        yield Series("", (*_labels(metric, texts), *extra), value)


def _labels(metric: Metric, texts: tuple[str, ...]) -> Labels:
    return tuple(zip(metric.labels, map(printable, texts), strict=True))


def _histogram(histogram: Histogram, extra: Labels) -> Iterator[Series]:
    cumulated = 0
    for bound, count in zip((*histogram.bounds, math.inf), histogram.counts, strict=True):
        cumulated += count
        yield Series("_bucket", (*extra, ("le", number(bound))), cumulated)
    yield Series("_sum", extra, histogram.sum)
    yield Series("_count", extra, cumulated)


def _param_block(view: OptimizerView) -> Iterator[Block]:
    record, layout = view.run_totals.record, view.layout
    if record is None or layout is None or not len(layout.chosen.indices):
        return
    indices, snapshot = layout.chosen.indices, record.snapshot
    yield Block(layout.lines, snapshot.norm[indices], snapshot.calls[indices] > 0)


def _group_norms(view: OptimizerView) -> Iterable[Value]:
    """Root sum of squares by label group, over parameters with a gradient; no gradient, no series."""
    record, layout = view.run_totals.record, view.layout
    if record is None or layout is None or not layout.groups:
        return
    snapshot = record.snapshot
    has_S = (snapshot.calls > 0) & (layout.group_of >= 0)
    group = layout.group_of[has_S]
    squares = np.square(snapshot.norm[has_S], dtype=np.float64)
    totals = np.sqrt(np.bincount(group, squares, len(layout.groups)))
    for i in np.flatnonzero(np.bincount(group, minlength=len(layout.groups))):
        yield (layout.groups[i],), float(totals[i])


def _active(view: OptimizerView) -> Iterable[Value]:
    record = view.run_totals.record
    firing = record.verdict.firing if record is not None else {}
    rules = dict.fromkeys([rule for rule, _, _ in view.run_totals.firings] + list(firing))
    return [((rule,), int(rule in firing)) for rule in rules]


def _one(value: float) -> list[Value]:
    return [((), value)]


def _latest(read: Callable[[Record], float | None]) -> Callable[[OptimizerView], Iterable[Value]]:
    """A gauge of the latest Record: absent before the first one, and where there is no value."""

    def values(view: OptimizerView) -> Iterable[Value]:
        value = read(view.run_totals.record) if view.run_totals.record is not None else None
        return [] if value is None else _one(value)

    return values


def _observed(view: OptimizerView) -> Iterable[Value]:
    """The last values that the script has given, in the order of their names."""
    observed = view.run_totals.observed
    names = sorted(observed)
    return [((shown,), observed[name]) for shown, name in zip(distinct(names), names, strict=True)]


def _recent_max(view: OptimizerView) -> Iterable[Value]:
    return _one(view.run_totals.recent_max.value()) if view.run_totals.record is not None else []


def _run_info(view: View) -> Iterable[Value]:
    run = view.run
    numbers = (str(run.rank), str(run.world_size), str(run.attempt))
    return [((run.run_id, *numbers, run.host, run.script, run.rules_digest), 1)]


def _build_info(view: View) -> Iterable[Value]:
    versions = view.run.versions
    return [(tuple(versions.get(name, "") for name in ("gradwatch", "python", "torch")), 1)]


def _by_rule(counts: Mapping[str, int]) -> Iterable[Value]:
    return [((rule,), count) for rule, count in counts.items()]


def _by_component(values: Mapping[str, float]) -> Iterable[Value]:
    return [((component,), value) for component, value in values.items()]


def _of_process(view: View, name: str) -> Iterable[Value]:
    """Absent where it is not counted: in what a journal restores."""
    return _one(view.process[name]) if name in view.process else []


_OF_PROCESS: dict[str, Callable[[View], Iterable[Value]]] = {
    "gradwatch_build_info": _build_info,
    "gradwatch_run_info": _run_info,
    "gradwatch_run_start_timestamp_seconds": lambda view: _one(view.run.start_time),
    "gradwatch_run_end_timestamp_seconds": lambda view: _one(view.end.time) if view.end else [],
    "gradwatch_run_outcome": lambda view: [((view.end.outcome,), 1)] if view.end else [],
    # Every component that ever said whether it is up has an error counter, at 0 before its first fault.
    "gradwatch_internal_errors_total": lambda view: _by_component(
        {**dict.fromkeys(view.up, 0), **view.errors}
    ),
    "gradwatch_component_up": lambda view: _by_component({name: int(up) for name, up in view.up.items()}),
    "gradwatch_process_steps_total": lambda view: _of_process(view, "steps"),
    "gradwatch_process_watched_steps_total": lambda view: _of_process(view, "watched"),
    "gradwatch_process_waiting_steps": lambda view: _of_process(view, "waiting"),
    "gradwatch_process_steps_under_way": lambda view: _of_process(view, "under_way"),
    "gradwatch_process_rejected_steps_total": lambda view: _of_process(view, "rejected"),
    "gradwatch_process_backwards_total": lambda view: _of_process(view, "backwards"),
    "gradwatch_process_grad_calls_total": lambda view: _of_process(view, "grad_calls"),
    "gradwatch_process_clips_total": lambda view: _of_process(view, "clips"),
    "gradwatch_rule_inactive": lambda view: [(pair, 1) for pair in view.inactive.items()],
    "gradwatch_config_last_reload_successful": lambda view: _one(int(view.last_reload_successful)),
}

_HISTOGRAMS: dict[str, Callable[[RunTotals], Histogram]] = {
    "gradwatch_step_grad_norm": lambda run_totals: run_totals.grad_norm,
    "gradwatch_step_duration_seconds": lambda run_totals: run_totals.step_seconds,
    "gradwatch_observe_duration_seconds": lambda run_totals: run_totals.observe_seconds,
}

_OF_OPTIMIZER: dict[str, Callable[[OptimizerView], Iterable[Value]]] = {
    "gradwatch_steps_total": lambda view: _one(view.run_totals.steps),
    "gradwatch_last_step_timestamp_seconds": _latest(lambda record: record.wall_time),
    "gradwatch_grad_norm": _latest(lambda record: record.snapshot.total_norm),
    "gradwatch_grad_norm_applied": _latest(
        lambda record: record.snapshot.total_norm_applied if record.snapshot.applied_known else None
    ),
    "gradwatch_grad_norm_recent_max": _recent_max,
    "gradwatch_group_grad_norm": _group_norms,
    "gradwatch_nonfinite_steps_total": lambda view: _one(view.run_totals.nonfinite_steps),
    "gradwatch_nonfinite_elements_total": lambda view: _one(view.run_totals.nonfinite_elements),
    "gradwatch_rule_firings_total": lambda view: view.run_totals.firings.items(),
    "gradwatch_rule_active": _active,
    "gradwatch_actions_total": lambda view: view.run_totals.actions.items(),
    "gradwatch_shadow_actions_total": lambda view: view.run_totals.shadow_actions.items(),
    "gradwatch_action_failures_total": lambda view: _by_rule(view.run_totals.action_failures),
    "gradwatch_escalations_total": lambda view: _by_rule(view.run_totals.escalations),
    "gradwatch_checkpoint_healthy": _latest(
        lambda record: None if record.checkpoint is None else float(record.checkpoint.healthy)
    ),
    "gradwatch_last_healthy_step": _latest(
        lambda record: None if record.checkpoint is None else record.checkpoint.last_healthy_step
    ),
    "gradwatch_clipped_steps_total": lambda view: _one(view.run_totals.clipped_steps),
    "gradwatch_skipped_steps_total": lambda view: _one(view.run_totals.skipped_steps),
    "gradwatch_provisional_steps_total": lambda view: _one(view.run_totals.provisional_steps),
    "gradwatch_loss": _latest(lambda record: record.snapshot.scalars.get("loss")),
    "gradwatch_learning_rate": _latest(lambda record: record.snapshot.scalars.get("lr")),
    "gradwatch_noise_scale": lambda view: (
        [] if view.run_totals.noise_scale is None else _one(view.run_totals.noise_scale)
    ),
    "gradwatch_observed_value": _observed,
    "gradwatch_loss_scale": _latest(lambda record: record.snapshot.loss_scale),
    "gradwatch_scaler_skips_total": lambda view: _one(view.run_totals.scaler_skips),
    "gradwatch_irreproducible_steps_total": lambda view: _one(view.run_totals.irreproducible_steps),
    "gradwatch_overhead_ratio": lambda view: _one(view.run_totals.overhead_ratio),
    "gradwatch_stall_threshold_seconds": lambda view: _one(view.run_totals.stall_threshold_seconds),
    "gradwatch_coverage_ratio": _latest(lambda record: record.snapshot.coverage),
    "gradwatch_params": lambda view: _one(view.layout.params if view.layout else 0),
    "gradwatch_params_exported": lambda view: _one(len(view.layout.chosen.indices) if view.layout else 0),
    "gradwatch_param_column": lambda view: view.columns,
    "gradwatch_param_column_series_dropped": lambda view: _one(view.columns_left_out),
    "gradwatch_series_dropped": lambda view: _one(view.layout.chosen.dropped if view.layout else 0),
}
