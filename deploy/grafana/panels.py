"""What the dashboards are made of: queries, panels, variables, with Grafana's own SDK (grafana-foundation-sdk)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from grafana_foundation_sdk.builders import common, stat, table, timeseries
from grafana_foundation_sdk.builders.dashboard import (
    Dashboard,
    DashboardLink,
    DatasourceVariable,
    QueryVariable,
    Row,
    ThresholdsConfig,
)
from grafana_foundation_sdk.builders.prometheus import Dataquery
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


def with_all(made: Dashboard, panels: Sequence[Any]) -> Dashboard:
    """Rows and panels in their order."""
    for panel in panels:
        made = made.with_row(panel) if isinstance(panel, Row) else made.with_panel(panel)
    return made
