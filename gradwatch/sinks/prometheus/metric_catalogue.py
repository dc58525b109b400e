"""The catalogue: every metric gradwatch exports, once. HELP, manual, dashboards and tests come from it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

MetricKind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric family.

    `name` in full (`_total` included); `help` one sentence; `source` where the value comes from; `labels` in
    order, without `optimizer`, which `per_optimizer` families get where a run has more than one, or where no optimizer
    steps (`optimizer="none"`: observed only); `buckets`
    upper bounds of a histogram, without +Inf.
    """

    name: str
    kind: MetricKind
    help: str
    source: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    per_optimizer: bool = True


NORM_BUCKETS = tuple(float(f"1e{exponent}") for exponent in range(-8, 5))
OBSERVE_BUCKETS = (1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 0.1, 1.0)
STEP_BUCKETS = (1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)

METRICS: tuple[Metric, ...] = (
    Metric(
        "gradwatch_build_info",
        "gauge",
        "Versions of gradwatch, Python and torch; the value is always 1.",
        "RunInfo.versions",
        ("version", "python", "torch"),
        per_optimizer=False,
    ),
    Metric(
        "gradwatch_run_info",
        "gauge",
        "Identity of the run this process belongs to; the value is always 1.",
        "RunInfo",
        ("run_id", "rank", "world_size", "attempt", "host", "script", "rules_digest"),
        per_optimizer=False,
    ),
    Metric(
        "gradwatch_run_start_timestamp_seconds",
        "gauge",
        "Unix time at which gradwatch attached to the model in this attempt of the run.",
        "RunInfo.start_time",
        per_optimizer=False,
    ),
    Metric(
        "gradwatch_run_end_timestamp_seconds",
        "gauge",
        "Unix time at which the process ended, or of its last sign of life; absent while it runs.",
        "RunEnd.time",
        per_optimizer=False,
    ),
    Metric(
        "gradwatch_run_outcome",
        "gauge",
        "How it ended: finished, stopped (by a rule or Ctrl-C), failed (by an exception) or died; the value is 1.",
        "RunEnd.outcome",
        ("outcome",),
        per_optimizer=False,
    ),
    Metric(
        "gradwatch_steps_total",
        "counter",
        "Optimizer steps observed, skipped ones included.",
        "number of Records",
    ),
    Metric(
        "gradwatch_last_step_timestamp_seconds",
        "gauge",
        "Unix time of the last optimizer step observed.",
        "Record.wall_time",
    ),
    Metric(
        "gradwatch_grad_norm",
        "gauge",
        "L2 norm of all gradients at the last step, before any clipping, loss scale removed.",
        "Snapshot.total_norm",
    ),
    Metric(
        "gradwatch_grad_norm_applied",
        "gauge",
        "L2 norm of all gradients as the optimizer got them at the last step, after clipping; absent where unknown.",
        "Snapshot.total_norm_applied",
    ),
    Metric(
        "gradwatch_grad_norm_recent_max",
        "gauge",
        "Largest gradient norm in the 60 seconds up to the last step; NaN steps do not count.",
        "maximum of Snapshot.total_norm",
    ),
    Metric(
        "gradwatch_group_grad_norm",
        "gauge",
        "L2 norm of the gradients of one group of the rule file at the last step, before any clipping.",
        "root sum of squares of Snapshot.norm by Sites.groups",
        ("group",),
    ),
    Metric(
        "gradwatch_step_grad_norm",
        "histogram",
        "Gradient norm before clipping, over steps; steps with a non-finite norm are left out.",
        "Snapshot.total_norm",
        buckets=NORM_BUCKETS,
    ),
    Metric(
        "gradwatch_nonfinite_steps_total",
        "counter",
        "Steps with a NaN or Inf in any gradient, those a GradScaler rejected itself included.",
        "Snapshot.columns['nonfinite'], else Snapshot.total_norm",
    ),
    Metric(
        "gradwatch_nonfinite_elements_total",
        "counter",
        "NaN and Inf elements in gradients; a lower bound where they were not counted one by one.",
        "Snapshot.columns['nonfinite'], else Snapshot.norm",
    ),
    Metric(
        "gradwatch_rule_firings_total",
        "counter",
        "Times a rule began to fire, re-fires within its cooldown included.",
        "Verdict.events of kind firing",
        ("rule", "kind", "severity"),
    ),
    Metric(
        "gradwatch_rule_active",
        "gauge",
        "1 if the rule was firing at the last step, else 0.",
        "Verdict.firing",
        ("rule",),
    ),
    Metric(
        "gradwatch_actions_total",
        "counter",
        "Times an action was carried out for a rule.",
        "Decision.orders",
        ("rule", "action"),
    ),
    Metric(
        "gradwatch_shadow_actions_total",
        "counter",
        "Times a rule in shadow mode would have acted.",
        "Decision.orders with shadow",
        ("rule", "action"),
    ),
    Metric(
        "gradwatch_action_failures_total",
        "counter",
        "Times the actions of a rule could not be carried out; what its on_error says was done instead.",
        "Verdict.events of kind failed",
        ("rule",),
    ),
    Metric(
        "gradwatch_escalations_total",
        "counter",
        "Times a rung of the ladder of a rule was reached.",
        "Verdict.events of kind escalated",
        ("rule",),
    ),
    Metric(
        "gradwatch_checkpoint_healthy",
        "gauge",
        "1 if a checkpoint saved after the last step is healthy, else 0.",
        "Record.checkpoint",
    ),
    Metric(
        "gradwatch_last_healthy_step",
        "gauge",
        "The last optimizer step after which a checkpoint was healthy; absent before the first.",
        "Record.checkpoint",
    ),
    Metric(
        "gradwatch_clipped_steps_total",
        "counter",
        "Steps whose gradients were scaled down between backward and optimizer, by gradwatch or by the script.",
        "Snapshot.total_norm_applied below Snapshot.total_norm",
    ),
    Metric(
        "gradwatch_skipped_steps_total",
        "counter",
        "Optimizer steps skipped by gradwatch: parameters and optimizer state left as they were.",
        "Decision.skip",
    ),
    Metric(
        "gradwatch_provisional_steps_total",
        "counter",
        "Steps whose norms may be post-clip, as before the loop's accumulation is known; no baseline uses them.",
        "Snapshot.provisional",
    ),
    Metric(
        "gradwatch_loss",
        "gauge",
        "Loss of the last step: what backward was called on, or was observed; absent where there was neither.",
        "Snapshot.scalars['loss']",
    ),
    Metric(
        "gradwatch_learning_rate",
        "gauge",
        "Largest learning rate of the optimizer's parameter groups that are trained, at the last step.",
        "Snapshot.scalars['lr']",
    ),
    Metric(
        "gradwatch_noise_scale",
        "gauge",
        "Gradient noise scale in local batches when ranks last compared theirs; absent without a rule on it.",
        "Snapshot.scalars, by distributed.noise_scale",
    ),
    Metric(
        "gradwatch_observed_value",
        "gauge",
        "Last value given to observe() under a name of the script's own; of the first 50 names.",
        "Snapshot.scalars",
        ("name",),
    ),
    Metric(
        "gradwatch_loss_scale",
        "gauge",
        "Loss scale of the GradScaler at the last step; absent without one.",
        "Snapshot.loss_scale",
    ),
    Metric(
        "gradwatch_scaler_skips_total",
        "counter",
        "Steps that the GradScaler rejected because gradients overflowed; not an action of gradwatch.",
        "Snapshot.scalars['scaler_skip']",
    ),
    Metric(
        "gradwatch_irreproducible_steps_total",
        "counter",
        "Steps that gave another output when they were run again from the same inputs and random state.",
        "Finding.phase 'irreproducible', on the rank that it was found on",
    ),
    Metric(
        "gradwatch_step_duration_seconds",
        "histogram",
        "Time from one optimizer step to the next.",
        "Record.step_seconds",
        buckets=STEP_BUCKETS,
    ),
    Metric(
        "gradwatch_observe_duration_seconds",
        "histogram",
        "Time gradwatch itself took per step: capture, rules, sinks.",
        "Record.overhead_seconds",
        buckets=OBSERVE_BUCKETS,
    ),
    Metric(
        "gradwatch_overhead_ratio",
        "gauge",
        "Share of the time of recent steps (half-life 100) that gradwatch itself took.",
        "Record.overhead_seconds / Record.step_seconds",
    ),
    Metric(
        "gradwatch_stall_threshold_seconds",
        "gauge",
        "Time without a step after which the run counts as stalled: 20 average steps, at least stall_seconds.",
        "Record.step_seconds",
    ),
    Metric(
        "gradwatch_coverage_ratio",
        "gauge",
        "Share of the expected parameters that gradwatch can measure; below 1 some gradients are not watched.",
        "Snapshot.coverage",
    ),
    Metric(
        "gradwatch_params",
        "gauge",
        "Parameters watched.",
        "Sites of kind param",
    ),
    Metric(
        "gradwatch_params_exported",
        "gauge",
        "Parameters that have a gradwatch_param_grad_norm series of their own.",
        "params, top_k and max_series of the sink",
    ),
    Metric(
        "gradwatch_series_dropped",
        "gauge",
        "Parameters that should have a series and have none, because max_series is reached.",
        "max_series of the sink",
    ),
    Metric(
        "gradwatch_param_grad_norm",
        "gauge",
        "L2 norm of one parameter's gradient at the last step, before any clipping; absent without one.",
        "Snapshot.norm",
        ("param", "group"),
    ),
    Metric(
        "gradwatch_param_column",
        "gauge",
        "Last value of one column of a parameter, read at the cadence of its rules; units differ: choose a column.",
        "Snapshot.columns, of the parameters that gradwatch_param_grad_norm shows",
        ("column", "param", "group"),
    ),
    Metric(
        "gradwatch_param_column_series_dropped",
        "gauge",
        "Series of gradwatch_param_column that are left out, because there are max_series of them.",
        "max_series of the sink",
    ),
    Metric(
        "gradwatch_internal_errors_total",
        "counter",
        "Internal errors of gradwatch; training was not affected.",
        "Health.errors",
        ("component",),
        per_optimizer=False,
    ),
    Metric(
        "gradwatch_component_up",
        "gauge",
        "1 if a component of gradwatch works, 0 if it is switched off after repeated errors.",
        "Health.up",
        ("component",),
        per_optimizer=False,
    ),
    *(
        Metric(
            name,
            "counter" if name.endswith("_total") else "gauge",
            text,
            "gradwatch.taps.process_totals",
            per_optimizer=False,
        )
        for name, text in (
            (
                "gradwatch_process_steps_total",
                "Optimizer steps that this process took, watched (gradwatch_process_watched_steps_total) or not.",
            ),
            (
                "gradwatch_process_watched_steps_total",
                "Those of them that gradwatch watched; gradwatch_steps_total counts them when they are judged.",
            ),
            (
                "gradwatch_process_waiting_steps",
                "Those watched that are not judged yet: ordinary steps are judged some at a time.",
            ),
            (
                "gradwatch_process_steps_under_way",
                "Threads of this process that are in an optimizer step, or whose last one an exception ended.",
            ),
            (
                "gradwatch_process_rejected_steps_total",
                "Steps of this process that a GradScaler skipped, watched or not.",
            ),
            ("gradwatch_process_backwards_total", "Backwards of this process that add to .grad."),
            (
                "gradwatch_process_grad_calls_total",
                "Calls of torch.autograd.grad in this process, which fill no .grad.",
            ),
            ("gradwatch_process_clips_total", "Calls of torch's clip_grad functions in this process."),
        )
    ),
    Metric(
        "gradwatch_rule_inactive",
        "gauge",
        "1 for a rule or group (group:NAME) that matches nothing, has no data yet, or whose action is not possible.",
        "Health.inactive, Health.unfed",
        ("rule", "reason"),
        per_optimizer=False,
    ),
    Metric(
        "gradwatch_config_last_reload_successful",
        "gauge",
        "1 if the last attempt to load the rule file succeeded, else 0.",
        "the rule file in use",
        per_optimizer=False,
    ),
)

SERVE_METRICS: tuple[Metric, ...] = (
    Metric(
        "gradwatch_serve_processes",
        "gauge",
        "Training processes found in the run folders, by state.",
        "Fleet.members",
        ("state",),
    ),
    Metric(
        "gradwatch_serve_targets",
        "gauge",
        "Processes in the list of scrape targets.",
        "Fleet.targets",
    ),
    Metric(
        "gradwatch_serve_refused_targets",
        "gauge",
        "Running processes of other machines that are not in the list of scrape targets, because no --allow "
        "covers them.",
        "Fleet.refused",
    ),
    Metric(
        "gradwatch_serve_last_scan_timestamp_seconds",
        "gauge",
        "Unix time of the last scan of the run folders.",
        "Fleet.scanned_at",
    ),
    Metric(
        "gradwatch_serve_scan_duration_seconds",
        "gauge",
        "Duration of the last scan of the run folders.",
        "Fleet.scan_seconds",
    ),
    Metric(
        "gradwatch_serve_errors_total",
        "counter",
        "Run folders that could not be read, and faults of the server itself.",
        "Fleet.errors",
    ),
)
"""What `gradwatch serve` says of itself, beside the last counters of runs that have ended."""


def documentation(metrics: Iterable[Metric] = METRICS) -> str:
    """A catalogue as a Markdown table, for the manual."""
    rows = ["| metric | type | labels | meaning |", "|---|---|---|---|"]
    for metric in metrics:
        labels = ", ".join(f"`{label}`" for label in metric.labels) or "–"
        rows.append(f"| `{metric.name}` | {metric.kind} | {labels} | {metric.help} |")
    return "\n".join(rows) + "\n"
