"""The Grafana dashboards, written with Grafana's own SDK: python deploy/grafana/generate.py

Needs grafana-foundation-sdk (a development dependency, see pyproject.toml); what it writes is committed and shipped,
and a test regenerates it. Every query is run against a real Prometheus by tests/deploy/test_dashboards.py.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grafana_foundation_sdk.builders import bargauge, common, heatmap, stat, table, timeseries
from grafana_foundation_sdk.builders.dashboard import (
    AnnotationQuery,
    Dashboard,
    DashboardLink,
    DatasourceVariable,
    QueryVariable,
    Row,
    ThresholdsConfig,
)
from grafana_foundation_sdk.builders.prometheus import Dataquery
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import ScaleDistribution
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DashboardLinkType,
    DataSourceRef,
    Threshold,
    ThresholdsMode,
    VariableRefresh,
)
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

FOLDER = Path(__file__).parent / "dashboards"
SOURCE = DataSourceRef(type_val="prometheus", uid="$datasource")
RUN = 'job=~"$job",run_id=~"$run_id"'
RANK = f'{RUN},rank=~"$rank"'
RATE = "$__rate_interval"


def query(expr: str, legend: str = "", instant: bool = False, heat: bool = False) -> Dataquery:
    """One query, over the time range or at its end."""
    made = Dataquery().expr(expr).legend_format(legend).datasource(SOURCE)
    if heat:
        made = made.format(PromQueryFormat.HEATMAP)
    return made.instant() if instant else made.range()


def steps(*levels: tuple[float | None, str]) -> ThresholdsConfig:
    """Colours from a value on; None is the lowest."""
    return (
        ThresholdsConfig()
        .mode(ThresholdsMode.ABSOLUTE)
        .steps([Threshold(value=value, color=colour) for value, colour in levels])
    )


OK_IS_ZERO = steps((None, "green"), (1, "red"))
CALM = steps((None, "text"))


def number(
    title: str, about: str, expr: str, unit: str, colours: ThresholdsConfig = CALM, span: int = 3
) -> Any:
    """One number, as of the end of the time range."""
    return (
        stat.Panel()
        .title(title)
        .description(about)
        .datasource(SOURCE)
        .unit(unit)
        .thresholds(colours)
        .span(span)
        .height(4)
        .with_target(query(expr, instant=True))
    )


def lines(title: str, about: str, unit: str, *queries: Dataquery, log: bool = False, span: int = 12) -> Any:
    """Curves over time; `log` for what spans decades."""
    panel = timeseries.Panel().title(title).description(about).datasource(SOURCE).unit(unit)
    panel = panel.span(span).height(8).line_width(1).fill_opacity(4)
    if log:
        scale = common.ScaleDistributionConfig().type(ScaleDistribution.LOG).log(10)
        panel = panel.scale_distribution(scale)
    for each in queries:
        panel = panel.with_target(each)
    return panel


def rows_of(title: str, about: str, unit: str, expr: str, span: int = 12) -> Any:
    """A table of the latest values, one row a series."""
    target = query(expr, instant=True).format(PromQueryFormat.TABLE)
    return (
        table.Panel()
        .title(title)
        .description(about)
        .datasource(SOURCE)
        .unit(unit)
        .span(span)
        .height(8)
        .with_target(target)
    )


def variable(name: str, label: str, values: str, everything: str = ".+") -> QueryVariable:
    """A choice among the values of a label; all by default."""
    return (
        QueryVariable(name)
        .label(label)
        .datasource(SOURCE)
        .query(values)
        .multi(True)
        .include_all(True)
        .all_value(everything)
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
    )


def board(uid: str, title: str, about: str) -> Dashboard:
    """What both dashboards share."""
    return (
        Dashboard(title)
        .uid(uid)
        .description(about)
        .tags(["gradwatch"])
        .refresh("30s")
        .time("now-1h", "now")
        .timezone("browser")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .readonly()
        .with_variable(DatasourceVariable("datasource").label("Data source").type("prometheus"))
        .with_variable(variable("job", "Job", "label_values(gradwatch_run_info, job)"))
        .link(
            DashboardLink("gradwatch").type(DashboardLinkType.DASHBOARDS).tags(["gradwatch"]).keep_time(True)
        )
    )


def run_dashboard() -> Dashboard:
    """One run: is it healthy, where is it not, what was done about it."""
    made = board("gradwatch-run", "gradwatch / run", "The gradients of one training run, rank by rank.")
    made = made.with_variable(
        variable("run_id", "Run", 'label_values(gradwatch_run_info{job=~"$job"}, run_id)')
    )
    made = made.with_variable(
        variable("rank", "Rank", f"label_values(gradwatch_run_info{{{RUN}}}, rank)", ".*")
    )
    made = made.with_variable(
        variable("group", "Group", f"label_values(gradwatch_group_grad_norm{{{RUN}}}, group)", ".*")
    )
    for name, colour in (("Rule firings", "red"), ("Actions", "orange"), ("Run start", "blue")):
        made = made.annotation(
            AnnotationQuery().name(name).datasource(SOURCE).enable(True).icon_color(colour)
        )
    steps_rate = f"rate(gradwatch_steps_total{{{RANK}}}[{RATE}])"
    panels: Sequence[Any] = (
        Row("Is it healthy?"),
        number(
            "Rules firing",
            "Rules that were firing at the last step of any rank.",
            f"sum(max by (rule) (gradwatch_rule_active{{{RANK}}}))",
            "short",
            OK_IS_ZERO,
        ),
        number("Steps / s", "Optimizer steps per second of a rank.", f"max({steps_rate})", "ops"),
        number(
            "Since last step",
            "Age of the oldest last step among the ranks.",
            f"time() - min(max without (optimizer) (gradwatch_last_step_timestamp_seconds{{{RANK}}}))",
            "s",
            steps((None, "green"), (300, "red")),
        ),
        number(
            "Firings",
            "Rule firings in the time range, the same rule on several ranks counted once.",
            f"round(sum(max by (rule) (increase(gradwatch_rule_firings_total{{{RANK}}}[$__range]))))",
            "short",
            steps((None, "green"), (0.5, "orange")),
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
            f"max(gradwatch_overhead_ratio{{{RANK}}})",
            "percentunit",
            steps((None, "green"), (0.05, "red")),
        ),
        number(
            "Coverage",
            "Share of the parameters that can be measured; below 100 % gradwatch is partly blind.",
            f"min(gradwatch_coverage_ratio{{{RANK}}})",
            "percentunit",
            steps((None, "red"), (1, "green")),
        ),
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
        Row("Where?"),
        lines(
            "Firing rules",
            "Which rules were firing at the last step.",
            "short",
            query(
                f"max by (rule) (gradwatch_rule_active{{{RANK}}})",
                "{{rule}}",
            ),
        ),
        rows_of(
            "Firings by rule",
            "How often each rule has fired since the run began.",
            "short",
            f"sort_desc(max by (rule, kind, severity) (gradwatch_rule_firings_total{{{RANK}}}))",
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
        Row("What did gradwatch do?"),
        lines(
            "Actions",
            "Actions carried out per minute, by rule.",
            "short",
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
        lines(
            "Skipped steps",
            "Steps skipped by gradwatch, and those the GradScaler rejected itself, since the run began.",
            "short",
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
        Row("Ranks"),
        lines(
            "Steps / s by rank",
            "All ranks step together; one that falls away has been lost.",
            "ops",
            query(f"max by (rank) ({steps_rate})", "rank {{rank}}"),
        ),
        lines(
            "Since last step by rank",
            "The rank whose line rises first is the one that hangs.",
            "s",
            query(
                f"time() - max by (rank) (gradwatch_last_step_timestamp_seconds{{{RANK}}})", "rank {{rank}}"
            ),
        ),
        lines(
            "Step time",
            "Mean time from one optimizer step to the next.",
            "s",
            query(
                f"sum by (rank) (rate(gradwatch_step_duration_seconds_sum{{{RANK}}}[{RATE}])) "
                f"/ sum by (rank) (rate(gradwatch_step_duration_seconds_count{{{RANK}}}[{RATE}]))",
                "rank {{rank}}",
            ),
        ),
        lines(
            "Answering",
            "Whether each rank answered the last scrape (1) or not (0).",
            "short",
            query(f"max by (rank) (up{{{RANK}}})", "rank {{rank}}"),
        ),
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
        lines(
            "Faults",
            "Faults kept out of training since the run began, by component.",
            "short",
            query(f"sum by (component) (gradwatch_internal_errors_total{{{RANK}}})", "{{component}}"),
        ),
        lines(
            "Components",
            "Which parts work (1) and which are switched off after repeated faults (0).",
            "short",
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
    return with_all(made, panels)


def fleet_dashboard() -> Dashboard:
    """All runs: which need somebody."""
    made = board("gradwatch-fleet", "gradwatch / fleet", "All training runs, one line each.")
    job = 'job=~"$job"'
    panels: Sequence[Any] = (
        Row("Now"),
        number(
            "Stepping",
            "Runs that took a step in the last minutes.",
            f"count(run_id:gradwatch_steps:rate{{{job}}} > 0)",
            "short",
        ),
        number(
            "Ranks up",
            "Processes that answered the last scrape.",
            f"sum(run_id:gradwatch_targets:count{{{job}}})",
            "short",
        ),
        number(
            "Firing",
            "Runs in which some rule was firing at the last step.",
            f"count(run_id:gradwatch_rules_active:count{{{job}}} > 0) or vector(0)",
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
        Row("Runs"),
        rows_of(
            "Firing rules",
            "Runs with firing rules, the most first.",
            "short",
            f"sort_desc(run_id:gradwatch_rules_active:count{{{job}}})",
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
            query(f"run_id:gradwatch_steps:rate{{{job}}}", "{{run_id}}"),
        ),
        lines(
            "Gradient norm",
            "Largest over the ranks of each run, before any clipping.",
            "none",
            query(f"run_id:gradwatch_grad_norm:max{{{job}}}", "{{run_id}}"),
            log=True,
        ),
        lines(
            "Firings",
            "Rules that began to fire, per run.",
            "short",
            query(f"run_id:gradwatch_rule_firings:increase{{{job}}}", "{{run_id}}"),
        ),
        lines(
            "Non-finite steps",
            "Steps with a NaN or Inf, since each run began.",
            "short",
            query(f"run_id:gradwatch_nonfinite_steps:max{{{job}}}", "{{run_id}}"),
        ),
        lines(
            "Skipped steps",
            "Steps skipped by gradwatch since each run began.",
            "short",
            query(f"run_id:gradwatch_skipped_steps:max{{{job}}}", "{{run_id}}"),
        ),
        lines(
            "Step time",
            "Mean time of a step of each run.",
            "s",
            query(f"run_id:gradwatch_step_duration_seconds:mean{{{job}}}", "{{run_id}}"),
        ),
        lines(
            "Since last step",
            "Age of the newest step of each run.",
            "s",
            query(f"time() - run_id:gradwatch_last_step_timestamp_seconds:max{{{job}}}", "{{run_id}}"),
        ),
        lines(
            "Overhead and coverage",
            "Largest share of time gradwatch takes, and smallest share of parameters it can measure.",
            "percentunit",
            query(f"run_id:gradwatch_overhead:max{{{job}}}", "{{run_id}} overhead"),
            query(f"run_id:gradwatch_coverage:min{{{job}}}", "{{run_id}} coverage"),
        ),
    )
    return with_all(made, panels)


def with_all(made: Dashboard, panels: Sequence[Any]) -> Dashboard:
    """Rows and panels in their order."""
    for panel in panels:
        made = made.with_row(panel) if isinstance(panel, Row) else made.with_panel(panel)
    return made


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


def document(made: Dashboard) -> str:
    """JSON, the same bytes every time. What an annotation asks Prometheus is not in the SDK's schema."""
    found: dict[str, Any] = json.loads(JSONEncoder(sort_keys=True).encode(made.build()))
    for annotation in found["annotations"].get("list", []):
        if annotation["name"] in ANNOTATIONS:
            expr, title, text = ANNOTATIONS[annotation["name"]]
            annotation |= {"expr": expr, "titleFormat": title, "textFormat": text, "step": "15s"}
            if annotation["name"] == "Run start":
                annotation["useValueForTime"] = "on"
    return json.dumps(found, indent=1, sort_keys=True) + "\n"


def dashboards() -> dict[str, str]:
    """File name to content."""
    return {"run.json": document(run_dashboard()), "fleet.json": document(fleet_dashboard())}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, content in dashboards().items():
        (FOLDER / name).write_text(content, encoding="utf-8")
        print(FOLDER / name)
