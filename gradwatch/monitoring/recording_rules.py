"""Recording rules: what the fleet dashboard shows of every run, worked out once instead of per viewer.

Named `level:metric:operation`, as Prometheus recommends; the level is one run.
"""

from __future__ import annotations

from dataclasses import dataclass

from gradwatch.monitoring.scrape_interval import Pace


@dataclass(frozen=True, slots=True)
class Recording:
    """A recording rule: the new series, and what it is made of."""

    record: str
    expr: str


def firings_within(selector: str, window: str) -> str:
    """PromQL: how often each rule of these series fired in the window, one that began with its first scrape included.

    `increase` needs two samples, and takes the first for the beginning: what happened before it, it never sees. So the
    first value is added of a series that begins in the window, unless its process had the rule under other labels
    before (another optimizer's, those of `gradwatch serve`).
    """
    total = f"gradwatch_rule_firings_total{selector}"
    grown = f"increase({total}[{window}])"
    before = f"last_over_time({total}[1h] offset {window})"
    begun = f"(min_over_time({total}[{window}]) unless on (run_id, process, rule) {before})"
    return f"({grown} + {begun} or {grown} or {begun})"


def recordings(pace: Pace) -> tuple[Recording, ...]:
    """One number per run each; ranks step together, so a run is as fast as any of them."""
    by, window = "by (job, run_id)", pace.window
    steps = f"rate(gradwatch_steps_total[{window}])"
    took = f"rate(gradwatch_step_duration_seconds_sum[{window}])"
    count = f"rate(gradwatch_step_duration_seconds_count[{window}])"
    # Every rank judges the same reduced gradients: a rule that fires on all of them fires once.
    active = "max by (job, run_id, rule) (gradwatch_rule_active)"
    firings = f"max by (job, run_id, rule) ({firings_within('', window)})"
    return (
        Recording("run_id:gradwatch_steps:rate", f"max {by} ({steps})"),
        Recording(
            "run_id:gradwatch_step_duration_seconds:mean", f"sum {by} ({took}) / (sum {by} ({count}) > 0)"
        ),
        Recording("run_id:gradwatch_grad_norm:max", f"max {by} (gradwatch_grad_norm)"),
        Recording("run_id:gradwatch_rules_active:count", f"sum {by} ({active})"),
        Recording("run_id:gradwatch_rule_firings:increase", f"sum {by} ({firings})"),
        Recording("run_id:gradwatch_nonfinite_steps:max", f"max {by} (gradwatch_nonfinite_steps_total)"),
        Recording("run_id:gradwatch_skipped_steps:max", f"max {by} (gradwatch_skipped_steps_total)"),
        Recording("run_id:gradwatch_overhead:max", f"max {by} (gradwatch_overhead_ratio)"),
        Recording("run_id:gradwatch_coverage:min", f"min {by} (gradwatch_coverage_ratio)"),
        Recording("run_id:gradwatch_targets:count", f'count {by} (up{{job="gradwatch"}} == 1)'),
        Recording(
            "run_id:gradwatch_last_step_timestamp_seconds:max",
            f"max {by} (gradwatch_last_step_timestamp_seconds)",
        ),
    )
