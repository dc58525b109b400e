"""The dashboard of one run: is it healthy, where is it not, what was done about it."""

from __future__ import annotations

from typing import Any

from grafana_foundation_sdk.builders import bargauge, heatmap
from grafana_foundation_sdk.builders.dashboard import (
    AnnotationQuery,
    Dashboard,
    Row,
)
from grafana_foundation_sdk.models.dashboard import DynamicConfigValue
from panels import (
    OK_IS_ZERO,
    RANK,
    RATE,
    RUN,
    SOURCE,
    Column,
    board,
    by_row,
    counts,
    lines,
    number,
    query,
    rows_of,
    spans,
    states,
    steps,
    variable,
    with_all,
)

from gradwatch.monitoring.recording_rules import firings_within

ANNOTATIONS = {
    "Rule firings": (
        f"max by (rule, severity) (increase(gradwatch_rule_firings_total{{{RANK}}}[1m])) > 0",
        "{{rule}}",
        "severity {{severity}}",
    ),
    "Actions": (
        f"max by (rule, action) (increase(gradwatch_actions_total{{{RANK}}}[1m])) > 0",
        "{{action}}",
        "for {{rule}}",
    ),
    "Run start": (
        f"min by (run_id) (gradwatch_run_start_timestamp_seconds{{{RUN}}}) * 1000",
        "{{run_id}}",
        "start",
    ),
}

OF_RANK = "rank {{rank}} {{process}}"
"""Legend: the second process of a rank, and no other one, has the label `process`."""

FIRING = (
    f"max by (rule) (gradwatch_rule_active{{{RANK}}})"
    f" + max by (rule) (ceil(increase(gradwatch_rule_firings_total{{{RANK}}}[{RATE}])))"
)
HAS_FIRED = (
    f"max by (rule) (max_over_time(gradwatch_rule_active{{{RANK}}}[$__range] @ end()))"
    f" + max by (rule) (increase(gradwatch_rule_firings_total{{{RANK}}}[$__range] @ end()))"
)
STEPS_RATE = f"rate(gradwatch_steps_total{{{RANK}}}[{RATE}])"
DIED, TRAINS, FINISHED, STOPPED, ENDED, FAILED = range(6)
# A process that ends in order is no target any more; `gradwatch serve` knows how it ended.
PROCESS = (
    f'{DIED} * max(gradwatch_run_outcome{{{RANK},outcome="died"}})'
    f' or {FAILED} * max(gradwatch_run_outcome{{{RANK},outcome="failed"}})'
    f" or {TRAINS} * min(up{{{RANK}}})"
    f' or {STOPPED} * max(gradwatch_run_outcome{{{RANK},outcome="stopped"}})'
    f' or {FINISHED} * max(gradwatch_run_outcome{{{RANK},outcome="finished"}})'
    f" or {ENDED} * clamp(max(last_over_time(gradwatch_steps_total{{{RANK}}}[$__range])), 1, 1)"
)
OF_PROCESS = {
    str(DIED): ("died, or cut off", "red"),
    str(TRAINS): ("trains", "green"),
    str(FINISHED): ("finished", "text"),
    str(STOPPED): ("stopped", "orange"),
    str(ENDED): ("ended", "text"),
    str(FAILED): ("failed, by an exception", "red"),
}


def last(gauge: str) -> str:
    """Its last value in the time range: a job that has died keeps its numbers."""
    return f"last_over_time({gauge}{{{RANK}}}[$__range])"


def healthy() -> tuple[Any, ...]:
    """The one line that is looked at first."""
    return (
        Row("Is it healthy?"),
        number(
            "Fired",
            "Rule firings in the time range, the same rule on several ranks counted once.",
            f"round(sum(max by (rule) ({firings_within(f'{{{RANK}}}', '$__range')})))",
            "short",
            steps((None, "green"), (0.5, "red")),
        ),
        number(
            "Still firing",
            "Rules that were firing at the last step of any rank.",
            f"sum(max by (rule) ({last('gradwatch_rule_active')}))",
            "short",
            OK_IS_ZERO,
        ),
        number(
            "Process",
            "Whether all ranks still answer; of those that have ended, how (by `gradwatch serve`).",
            PROCESS,
            "short",
            texts=OF_PROCESS,
        ),
        number(
            "Steps / s",
            "Optimizer steps per second of a rank.",
            f"max({STEPS_RATE}) or 0 * max({last('gradwatch_steps_total')})",
            "ops",
        ),
        number(
            "Non-finite",
            "Steps with a NaN or Inf in any gradient, in the time range.",
            f"round(max(increase(gradwatch_nonfinite_steps_total{{{RANK}}}[$__range])))",
            "short",
            steps((None, "green"), (0.5, "red")),
        ),
        number(
            "Clipped",
            "Share of the steps of the time range whose gradients were made smaller, by whomever.",
            f"max(increase(gradwatch_clipped_steps_total{{{RANK}}}[$__range]) "
            f"/ increase(gradwatch_steps_total{{{RANK}}}[$__range]))",
            "percentunit",
        ),
        number(
            "Overhead",
            "Share of the time of recent steps that gradwatch itself took.",
            f"max({last('gradwatch_overhead_ratio')})",
            "percentunit",
            steps((None, "green"), (0.05, "red")),
        ),
        number(
            "Coverage",
            "Share of the parameters that can be measured; below 100 % some gradients are not watched.",
            f"min({last('gradwatch_coverage_ratio')})",
            "percentunit",
            steps((None, "red"), (1, "green")),
        ),
    )


def norms() -> tuple[Any, ...]:
    """How large gradients are, before and after clipping."""
    return (
        Row("Norms"),
        lines(
            "Gradient norm",
            "L2 norm over all parameters: before any clipping, and as the optimizer got it. A gap is a step with NaN.",
            "none",
            query(f"max(gradwatch_grad_norm{{{RANK}}})", "before clipping"),
            query(f"max(gradwatch_grad_norm_applied{{{RANK}}})", "applied"),
            query(f"max(gradwatch_grad_norm_recent_max{{{RANK}}})", "maximum of 60 s"),
            log=True,
        ),
        lines(
            "Loss and learning rate",
            "The loss that backward was called on, and the largest learning rate of the parameter groups (right).",
            "none",
            query(f"max(gradwatch_loss{{{RANK}}})", "loss"),
            query(f"max(gradwatch_learning_rate{{{RANK}}})", "learning rate"),
        ).override_by_name(
            "learning rate", [DynamicConfigValue(id_val="custom.axisPlacement", value="right")]
        ),
        by_row(
            "Norms by parameter",
            "log10 of the gradient norm of every exported parameter; a gap is NaN, zero or no gradient.",
            "none",
            query(
                f'log10(max by (param) (gradwatch_param_grad_norm{{{RANK},group=~"$group"}}) > 0)',
                "{{param}}",
            ),
        ),
        lines(
            "By group",
            "L2 norm per group of the rule file, before any clipping.",
            "none",
            query(f'max by (group) (gradwatch_group_grad_norm{{{RANK},group=~"$group"}})', "{{group}}"),
            log=True,
        ),
        heatmap.Panel()
        .title("Distribution of the norm")
        .description(
            "How many steps had a gradient norm in each decade; steps that were not finite are left out."
        )
        .datasource(SOURCE)
        .unit("none")
        .span(12)
        .height(8)
        .with_target(
            query(
                f"sum by (le) (increase(gradwatch_step_grad_norm_bucket{{{RANK}}}[{RATE}]))",
                "{{le}}",
                heat=True,
            )
        ),
        lines(
            "Spread over ranks",
            "Smallest and largest norm among the ranks; they differ only where ranks judge before the reduction.",
            "none",
            query(f"min(gradwatch_grad_norm{{{RANK}}})", "smallest"),
            query(f"max(gradwatch_grad_norm{{{RANK}}})", "largest"),
            log=True,
        ),
    )


def places() -> tuple[Any, ...]:
    """Which parameters and groups."""
    return (
        Row("Where?"),
        spans(
            "Firing rules",
            "When each rule was firing, or began to between two scrapes; rules that never did are left out.",
            {"0": ("calm", "transparent"), "1": ("firing", "red")},
            query(f"clamp_max({FIRING}, 1) and on (rule) ({HAS_FIRED} > 0)", "{{rule}}"),
        ).no_value("No rule has fired in this time."),
        rows_of(
            "Firings by rule",
            "How often each rule has fired since the run began.",
            {
                "rule": Column("Rule", width=220),
                "kind": Column("Kind"),
                "severity": Column("Severity"),
                "Value": Column("Firings", "short", ((None, "text"), (1, "orange"))),
            },
            f"max by (rule, kind, severity) (gradwatch_rule_firings_total{{{RANK}}})",
            sort="Firings",
        ),
        bargauge.Panel()
        .title("Largest norms")
        .description(
            "The twenty exported parameters with the largest gradient norm; NaN is never among them."
        )
        .datasource(SOURCE)
        .unit("none")
        .span(12)
        .height(10)
        .with_target(
            query(
                f'sort_desc(topk(20, max by (param) (gradwatch_param_grad_norm{{{RANK},group=~"$group"}})))',
                "{{param}}",
                instant=True,
            )
        ),
        bargauge.Panel()
        .title("Smallest norms")
        .description("The twenty exported parameters with the smallest gradient norm that is not zero.")
        .datasource(SOURCE)
        .unit("none")
        .span(12)
        .height(10)
        .with_target(
            query(
                f'sort(bottomk(20, max by (param) (gradwatch_param_grad_norm{{{RANK},group=~"$group"}}) > 0))',
                "{{param}}",
                instant=True,
            )
        ),
    )


def actions() -> tuple[Any, ...]:
    """What was skipped, clipped and stopped."""
    return (
        Row("What did gradwatch do?"),
        lines(
            "Actions",
            "Actions carried out per minute, by rule.",
            "opm",
            query(
                f"max by (rule, action) (rate(gradwatch_actions_total{{{RANK}}}[{RATE}])) * 60",
                "{{action}} for {{rule}}",
            ),
            query(
                f"max by (rule, action) (rate(gradwatch_shadow_actions_total{{{RANK}}}[{RATE}])) * 60",
                "{{action}} for {{rule}} (shadow)",
            ),
        ),
        lines(
            "Clip coefficient",
            "The norm applied over the norm before clipping; 1 is untouched.",
            "none",
            query(
                f"min(gradwatch_grad_norm_applied{{{RANK}}} / gradwatch_grad_norm{{{RANK}}})", "coefficient"
            ),
        ),
        counts(
            "Skipped steps",
            "Steps skipped by gradwatch, and those the GradScaler rejected itself, since the run began.",
            query(f"max(gradwatch_skipped_steps_total{{{RANK}}})", "by gradwatch"),
            query(f"max(gradwatch_scaler_skips_total{{{RANK}}})", "by the GradScaler"),
        ),
        lines(
            "Loss scale",
            "Of the GradScaler; nothing without one.",
            "none",
            query(f"max(gradwatch_loss_scale{{{RANK}}})", "loss scale"),
            log=True,
        ),
    )


def ranks() -> tuple[Any, ...]:
    """Rank beside rank."""
    return (
        Row("Ranks"),
        lines(
            "Steps / s by rank",
            "All ranks step together; one that falls away has been lost.",
            "ops",
            query(f"max by (rank, process) ({STEPS_RATE})", OF_RANK),
        ),
        lines(
            "Since last step by rank",
            "The rank whose line rises first is the one that hangs.",
            "s",
            query(
                f"time() - max by (rank, process) (gradwatch_last_step_timestamp_seconds{{{RANK}}})", OF_RANK
            ),
        ),
        lines(
            "Step time",
            "Mean time from one optimizer step to the next.",
            "s",
            query(
                f"sum by (rank, process) (rate(gradwatch_step_duration_seconds_sum{{{RANK}}}[{RATE}])) "
                f"/ sum by (rank, process) (rate(gradwatch_step_duration_seconds_count{{{RANK}}}[{RATE}]))",
                OF_RANK,
            ),
        ),
        states(
            "Answering",
            "1 if the rank answered the last scrape, else 0.",
            query(f"max by (rank, process) (up{{{RANK}}})", OF_RANK),
        ),
    )


def ourselves() -> tuple[Any, ...]:
    """Cost, faults and coverage of gradwatch."""
    return (
        Row("gradwatch itself"),
        lines(
            "Time per step",
            "What gradwatch takes of a step: median and 99th percentile.",
            "s",
            *(
                query(
                    f"histogram_quantile({quantile}, sum by (le) "
                    f"(rate(gradwatch_observe_duration_seconds_bucket{{{RANK}}}[{RATE}])))",
                    name,
                )
                for quantile, name in ((0.5, "median"), (0.99, "99 %"))
            ),
        ),
        counts(
            "Faults",
            "Faults kept out of training since the run began, by component.",
            query(f"sum by (component) (gradwatch_internal_errors_total{{{RANK}}})", "{{component}}"),
        ),
        states(
            "Components",
            "1 if a component works, 0 if it is switched off after repeated errors.",
            query(f"min by (component) (gradwatch_component_up{{{RANK}}})", "{{component}}"),
        ),
        lines(
            "Parameters",
            "Watched, exported with a series of their own, and left out because max_series is reached.",
            "short",
            query(f"max(gradwatch_params{{{RANK}}})", "watched"),
            query(f"max(gradwatch_params_exported{{{RANK}}})", "exported"),
            query(f"max(gradwatch_series_dropped{{{RANK}}})", "left out"),
        ),
    )


def run_dashboard() -> Dashboard:
    """One run: is it healthy, where is it not, what was done about it."""
    made = board("gradwatch-run", "gradwatch / run", "The gradients of one training run, rank by rank.")
    made = made.with_variable(
        variable("run_id", "Run", 'label_values(gradwatch_run_info{job=~"$job"}, run_id)')
    )
    made = made.with_variable(
        variable("rank", "Rank", f"label_values(gradwatch_steps_total{{{RUN}}}, rank)", ".*")
    )
    made = made.with_variable(
        variable("group", "Group", f"label_values(gradwatch_group_grad_norm{{{RUN}}}, group)", ".*")
    )
    for name, colour in (("Rule firings", "red"), ("Actions", "orange"), ("Run start", "blue")):
        made = made.annotation(
            AnnotationQuery().name(name).datasource(SOURCE).enable(True).icon_color(colour)
        )
    return with_all(made, (*healthy(), *norms(), *places(), *actions(), *ranks(), *ourselves()))
