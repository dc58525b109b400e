"""The dashboard of all runs: which need somebody."""

from __future__ import annotations

from typing import Any

from grafana_foundation_sdk.builders.dashboard import (
    Dashboard,
    Row,
)
from panels import CALM, OK_IS_ZERO, board, lines, number, query, rows_of, with_all

JOB = 'job=~"$job"'


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
            "Firing",
            "Runs in which some rule was firing at the last step.",
            f"count(run_id:gradwatch_rules_active:count{{{JOB}}} > 0) or vector(0)",
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
            )
            for state, colours in (
                ("finished", CALM),
                ("stopped", CALM),
                ("died", CALM),
                ("silent", CALM),
            )
        ),
    )


def runs() -> tuple[Any, ...]:
    """One line a run: what fires, how far it is, how it ended."""
    return (
        Row("Runs"),
        rows_of(
            "Firing rules",
            "Runs with firing rules, the most first.",
            "short",
            f"sort_desc(run_id:gradwatch_rules_active:count{{{JOB}}})",
        ),
        rows_of(
            "Alerts",
            "Every alert of gradwatch that is pending or firing.",
            "short",
            'ALERTS{alertname=~"Gradwatch.+"} or ALERTS_FOR_STATE{alertname=~"Gradwatch.+"}',
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
        lines(
            "Firings",
            "Rules that began to fire, per run.",
            "short",
            query(f"run_id:gradwatch_rule_firings:increase{{{JOB}}}", "{{run_id}}"),
        ),
        lines(
            "Non-finite steps",
            "Steps with a NaN or Inf, since each run began.",
            "short",
            query(f"run_id:gradwatch_nonfinite_steps:max{{{JOB}}}", "{{run_id}}"),
        ),
        lines(
            "Skipped steps",
            "Steps skipped by gradwatch since each run began.",
            "short",
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
            "Overhead and coverage",
            "Largest share of time gradwatch takes, and smallest share of parameters it can measure.",
            "percentunit",
            query(f"run_id:gradwatch_overhead:max{{{JOB}}}", "{{run_id}} overhead"),
            query(f"run_id:gradwatch_coverage:min{{{JOB}}}", "{{run_id}} coverage"),
        ),
    )


def fleet_dashboard() -> Dashboard:
    """All runs: which need somebody."""
    made = board("gradwatch-fleet", "gradwatch / fleet", "All training runs, one line each.")
    return with_all(made, (*now(), *runs()))
