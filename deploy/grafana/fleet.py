"""The dashboard of all runs: which need attention."""

from __future__ import annotations

from typing import Any

from grafana_foundation_sdk.builders.dashboard import (
    Dashboard,
    Row,
)
from panels import (
    CALM,
    OK_IS_ZERO,
    RUN_COLUMN,
    Column,
    board,
    counts,
    lines,
    number,
    query,
    rows_of,
    with_all,
)

from gradwatch.monitoring.recording_rules import firings_within

JOB = 'job=~"$job"'
RUN_COLUMNS = {
    "run_id": RUN_COLUMN,
    "Value #A": Column("Fired", "short", ((None, "green"), (1, "red"))),
    "Value #B": Column("Steps / s", "ops"),
    "Value #C": Column("Since last step", "s", ((None, "text"), (300, "red"))),
    "Value #D": Column("Gradient norm", "none"),
    "Value #E": Column("Non-finite", "short", ((None, "text"), (1, "red"))),
    "Value #F": Column("Skipped", "short", ((None, "text"), (1, "orange"))),
    "Value #G": Column("Overhead", "percentunit", ((None, "text"), (0.05, "red"))),
    "Value #H": Column("Coverage", "percentunit", ((None, "red"), (1, "text"))),
    "outcome": Column(
        "Ended",
        texts={
            "died": ("died", "red"),
            "failed": ("failed", "red"),
            "stopped": ("stopped", "orange"),
            "finished": ("finished", "green"),
        },
    ),
}
"""As the queries of the table come, A to I; of the last one only a label is shown."""


FIRED = (
    f"round(sum by (job, run_id) (max by (job, run_id, rule) ({firings_within(f'{{{JOB}}}', '$__range')})))"
)


def last(series: str) -> str:
    """Its last value in the time range."""
    return f"last_over_time({series}{{{JOB}}}[$__range])"


def now() -> tuple[Any, ...]:
    """What is going on, in numbers."""
    return (
        Row("Now"),
        number(
            "Stepping",
            "Runs that took a step in the last minutes.",
            f"count(run_id:gradwatch_steps:rate{{{JOB}}} > 0)",
            "short",
        ),
        number(
            "Ranks up",
            "Processes that answered the last scrape.",
            f"sum(run_id:gradwatch_targets:count{{{JOB}}})",
            "short",
        ),
        number(
            "Fired",
            "Runs in which a rule fired in the time range, or is firing.",
            f"count(max_over_time(run_id:gradwatch_rule_firings:increase{{{JOB}}}[$__range]) > 0.5 "
            f"or max_over_time(run_id:gradwatch_rules_active:count{{{JOB}}}[$__range]) > 0) or vector(0)",
            "short",
            OK_IS_ZERO,
        ),
        number(
            "Alerts",
            "gradwatch alerts that are firing.",
            'count(ALERTS{alertname=~"Gradwatch.+",alertstate="firing"}) or vector(0)',
            "short",
            OK_IS_ZERO,
        ),
        *(
            number(
                f"{state.capitalize()}",
                f"Processes that `gradwatch serve` knows as {state}.",
                f'sum(gradwatch_serve_processes{{state="{state}"}})',
                "short",
                colours,
                span,
            )
            for state, colours, span in (
                ("finished", CALM, 2),
                ("stopped", CALM, 2),
                ("failed", OK_IS_ZERO, 3),
                ("died", OK_IS_ZERO, 3),
                ("silent", CALM, 2),
            )
        ),
    )


def runs() -> tuple[Any, ...]:
    """One line a run: what fires, how far it is, how it ended."""
    return (
        Row("Runs"),
        rows_of(
            "Runs",
            "One line a run of the time range, those that fired most first; one that has ended keeps its last numbers.",
            RUN_COLUMNS,
            FIRED,
            f"run_id:gradwatch_steps:rate{{{JOB}}}",
            f"time() - {last('run_id:gradwatch_last_step_timestamp_seconds:max')}",
            last("run_id:gradwatch_grad_norm:max"),
            last("run_id:gradwatch_nonfinite_steps:max"),
            last("run_id:gradwatch_skipped_steps:max"),
            last("run_id:gradwatch_overhead:max"),
            last("run_id:gradwatch_coverage:min"),
            f"max by (run_id, outcome) (gradwatch_run_outcome{{{JOB}}}) == 1",
            sort="Fired",
            span=24,
        ),
        rows_of(
            "Alerts",
            "Every alert of gradwatch that is pending or firing, once for all ranks of a run.",
            {
                "alertname": Column("Alert", width=280),
                "alertstate": Column("State"),
                "severity": Column("Severity"),
                "run_id": RUN_COLUMN,
                "rule": Column("Rule"),
                "Value": Column("Ranks", "short"),
            },
            'count by (alertname, alertstate, severity, run_id, rule) (ALERTS{alertname=~"Gradwatch.+"})',
            sort="State",
            descending=False,
            span=24,
        ),
        lines(
            "Steps / s",
            "Optimizer steps per second of each run.",
            "ops",
            query(f"run_id:gradwatch_steps:rate{{{JOB}}}", "{{run_id}}"),
        ),
        lines(
            "Gradient norm",
            "Largest over the ranks of each run, before any clipping.",
            "none",
            query(f"run_id:gradwatch_grad_norm:max{{{JOB}}}", "{{run_id}}"),
            log=True,
        ),
        counts(
            "Firings",
            "Rules that began to fire in the last four scrapes, per run.",
            query(f"round(run_id:gradwatch_rule_firings:increase{{{JOB}}})", "{{run_id}}"),
        ),
        counts(
            "Non-finite steps",
            "Steps with a NaN or Inf, since each run began.",
            query(f"run_id:gradwatch_nonfinite_steps:max{{{JOB}}}", "{{run_id}}"),
        ),
        counts(
            "Skipped steps",
            "Steps skipped by gradwatch since each run began.",
            query(f"run_id:gradwatch_skipped_steps:max{{{JOB}}}", "{{run_id}}"),
        ),
        lines(
            "Step time",
            "Mean time of a step of each run.",
            "s",
            query(f"run_id:gradwatch_step_duration_seconds:mean{{{JOB}}}", "{{run_id}}"),
        ),
        lines(
            "Since last step",
            "Age of the newest step of each run.",
            "s",
            query(f"time() - run_id:gradwatch_last_step_timestamp_seconds:max{{{JOB}}}", "{{run_id}}"),
        ),
        lines(
            "Overhead",
            "Largest share of the time of a step that gradwatch takes, over the ranks of each run.",
            "percentunit",
            query(f"run_id:gradwatch_overhead:max{{{JOB}}}", "{{run_id}}"),
        ),
        lines(
            "Coverage",
            "Smallest share of the parameters that can be measured, over the ranks of each run.",
            "percentunit",
            query(f"run_id:gradwatch_coverage:min{{{JOB}}}", "{{run_id}}"),
        )
        .min(0)
        .max(1),
        counts(
            "Ranks up",
            "Processes of each run that answered the last scrape.",
            query(f"run_id:gradwatch_targets:count{{{JOB}}}", "{{run_id}}"),
        ),
    )


def fleet_dashboard() -> Dashboard:
    """All runs: which need attention."""
    made = board("gradwatch-fleet", "gradwatch / fleet", "All training runs, one line each.")
    return with_all(made, (*now(), *runs()))
