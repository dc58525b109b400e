"""What the dashboards are made of: queries, panels, variables, with Grafana's own SDK (grafana-foundation-sdk)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grafana_foundation_sdk.builders import common, heatmap, stat, statetimeline, table, timeseries
from grafana_foundation_sdk.builders.dashboard import (
    Dashboard,
    DashboardLink,
    DatasourceVariable,
    QueryVariable,
    Row,
    ThresholdsConfig,
)
from grafana_foundation_sdk.builders.prometheus import Dataquery
from grafana_foundation_sdk.models.common import LineInterpolation, ScaleDistribution, VisibilityMode
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DashboardLinkType,
    DataSourceRef,
    DataTransformerConfig,
    DynamicConfigValue,
    Threshold,
    ThresholdsMode,
    ValueMap,
    ValueMappingResult,
    VariableRefresh,
)
from grafana_foundation_sdk.models.heatmap import HeatmapColorMode, HeatmapColorScale
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
    title: str,
    about: str,
    expr: str,
    unit: str,
    colours: ThresholdsConfig = CALM,
    span: int = 3,
    texts: Mapping[str, tuple[str, str]] | None = None,
) -> Any:
    """One number, as of the end of the time range, or one of the `texts` in its place."""
    return (
        stat.Panel()
        .title(title)
        .description(about)
        .datasource(SOURCE)
        .unit(unit)
        .thresholds(colours)
        .mappings(words(texts or {}))
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


def words(texts: Mapping[str, tuple[str, str]]) -> list[ValueMap]:
    """Texts and colours in the place of values."""
    shown = {
        value: ValueMappingResult(text=text, color=colour, index=number)
        for number, (value, (text, colour)) in enumerate(texts.items())
    }
    return [ValueMap(options=shown)]


def spans(
    title: str, about: str, texts: Mapping[str, tuple[str, str]], *queries: Dataquery, span: int = 12
) -> Any:
    """A bar for each series, coloured by its state; `texts` are those of its values."""
    panel = statetimeline.Panel().title(title).description(about).datasource(SOURCE).unit("short")
    panel = panel.span(span).height(8).mappings(words(texts)).merge_values(True).row_height(0.8)
    panel = panel.show_value(VisibilityMode.NEVER).line_width(0).fill_opacity(80)
    for each in queries:
        panel = panel.with_target(each)
    return panel


def by_row(title: str, about: str, unit: str, each: Dataquery, span: int = 24) -> Any:
    """A row for each series over time, coloured by its value."""
    colours = (
        heatmap.HeatmapColorOptions()
        .mode(HeatmapColorMode.SCHEME)
        .scheme("Turbo")
        .scale(HeatmapColorScale.EXPONENTIAL)
        .exponent(1)
        .steps(64)
    )
    return (
        heatmap.Panel()
        .title(title)
        .description(about)
        .datasource(SOURCE)
        .unit(unit)
        .span(span)
        .height(10)
        .calculate(False)
        .color(colours)
        .cell_values(heatmap.CellValues().unit(unit))
        .with_target(each)
    )


def states(title: str, about: str, *queries: Dataquery, span: int = 12) -> Any:
    """Curves that are 1 or 0, drawn as steps."""
    panel = lines(title, about, "short", *queries, span=span).fill_opacity(0)
    return panel.line_interpolation(LineInterpolation.STEP_AFTER).min(0).max(1).decimals(0)


def counts(title: str, about: str, *queries: Dataquery, span: int = 12) -> Any:
    """Curves of whole numbers, flat at the bottom where nothing has happened."""
    panel = lines(title, about, "short", *queries, span=span)
    return panel.line_interpolation(LineInterpolation.STEP_AFTER).min(0).axis_soft_max(4).decimals(0)


@dataclass(frozen=True)
class Column:
    """A column of a table: its heading, and how its numbers are shown."""

    heading: str
    unit: str = ""
    colours: tuple[tuple[float | None, str], ...] = ()
    link: str = ""
    width: int = 0
    texts: Mapping[str, tuple[str, str]] | None = None

    def properties(self) -> list[DynamicConfigValue]:
        """As overrides of the field."""
        found = []
        if self.unit:
            found.append(DynamicConfigValue(id_val="unit", value=self.unit))
        if self.colours:
            levels = [{"value": value, "color": colour} for value, colour in self.colours]
            found.append(DynamicConfigValue(id_val="thresholds", value={"mode": "absolute", "steps": levels}))
            found.append(DynamicConfigValue(id_val="custom.cellOptions", value={"type": "color-text"}))
        if self.texts:
            shown = {
                value: {"text": text, "color": colour, "index": number}
                for number, (value, (text, colour)) in enumerate(self.texts.items())
            }
            found.append(DynamicConfigValue(id_val="mappings", value=[{"type": "value", "options": shown}]))
            found.append(DynamicConfigValue(id_val="custom.cellOptions", value={"type": "color-text"}))
        if self.width:
            found.append(DynamicConfigValue(id_val="custom.width", value=self.width))
        if self.link:
            found.append(
                DynamicConfigValue(id_val="links", value=[{"title": "Look at it", "url": self.link}])
            )
        return found


RUN_COLUMN = Column("Run", link="/d/gradwatch-run?var-run_id=${__value.raw}&${__url_time_range}", width=200)
"""The name of a run, which leads to its dashboard."""


def rows_of(
    title: str,
    about: str,
    columns: Mapping[str, Column],
    *exprs: str,
    sort: str,
    descending: bool = True,
    span: int = 12,
) -> Any:
    """A table of the latest values: labels and values as columns, in this order; nothing else is shown.

    The value of a single query is called Value, those of several Value #A, Value #B; their rows are merged by label.
    `sort` is the heading by which it is sorted at first.
    """
    panel = table.Panel().title(title).description(about).datasource(SOURCE).unit("short")
    order_by = common.TableSortByFieldState().display_name(sort).desc(descending)
    panel = panel.span(span).height(8).min_width(80).sort_by([order_by])
    for letter, expr in zip("ABCDEFGHIJ", exprs, strict=False):
        panel = panel.with_target(query(expr, instant=True).format(PromQueryFormat.TABLE).ref_id(letter))
    names = list(columns)
    order = {name: number for number, name in enumerate(names)}
    headings = {name: column.heading for name, column in columns.items()}
    changes = [
        DataTransformerConfig(id_val="filterFieldsByName", options={"include": {"names": names}}),
        DataTransformerConfig(
            id_val="organize",
            options={"excludeByName": {}, "indexByName": order, "renameByName": headings},
        ),
    ]
    if len(exprs) > 1:  # after the filter: rows are merged where all their labels are equal, __name__ too
        changes.insert(1, DataTransformerConfig(id_val="merge", options={}))
    for change in changes:
        panel = panel.with_transformation(change)
    for column in columns.values():
        if column.properties():
            panel = panel.override_by_name(column.heading, column.properties())
    return panel


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
    """Rows and panels in their order, numbered: links to a panel keep leading to it."""
    for number, panel in enumerate(panels, 1):
        panel = panel.id(number)
        made = made.with_row(panel) if isinstance(panel, Row) else made.with_panel(panel)
    return made
