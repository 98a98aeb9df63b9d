"""What the dashboards share: queries, panels, colours, variables, the frame."""

from __future__ import annotations

from collections.abc import Sequence

from grafana_foundation_sdk.builders import bargauge, common, dashboard, prometheus, stat, table, timeseries
from grafana_foundation_sdk.models.common import (
    BigValueColorMode,
    BigValueGraphMode,
    LegendDisplayMode,
    LegendPlacement,
    SortOrder,
    StackingMode,
    TooltipDisplayMode,
    VisibilityMode,
)
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DataSourceRef,
    DynamicConfigValue,
    Threshold,
    ThresholdsMode,
    VariableRefresh,
    VariableSort,
)

SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
# Every query takes the three variables, so that servers and models are never added up by accident.
ONE = 'job=~"$job", model=~"$model", instance=~"$instance"'
LEGEND = "{{model}} {{instance}}"

# Colour by meaning: the same state has the same colour in every panel.
COLOURS = {
    "used": "blue",
    "cached": "super-light-blue",
    "free": "green",
    "reserved": "gray",
    "promised, not yet held": "orange",
    "admit": "green",
    "wait": "orange",
    "never": "red",
    "stop": "green",
    "length": "blue",
    "aborted": "yellow",
    "rejected": "orange",
    "error": "red",
}
DASHED = DynamicConfigValue("custom.lineStyle", {"fill": "dash", "dash": [10, 10]})

Panel = timeseries.Panel | stat.Panel | table.Panel | bargauge.Panel


def query(expression: str, legend: str = LEGEND) -> prometheus.Dataquery:
    return prometheus.Dataquery().datasource(SOURCE).expr(expression).legend_format(legend)


def rate(metric: str, more: str = "") -> str:
    """Per second over Grafana's rate interval, of the series of this dashboard."""
    return f"rate({metric}{{{ONE}{', ' + more if more else ''}}}[$__rate_interval])"


def lines(
    title: str, text: str, unit: str, *queries: prometheus.Dataquery, width: int = 12
) -> timeseries.Panel:
    """Lines over time; a legend with the last value."""
    built = (
        timeseries.Panel()
        .title(title)
        .description(text)
        .datasource(SOURCE)
        .unit(unit)
        .min(0)
        .span(width)
        .height(9)
        .line_width(1)
        .show_points(VisibilityMode.NEVER)
        .no_value("no data: is the server up and scraped?")
        .legend(
            common.VizLegendOptions()
            .display_mode(LegendDisplayMode.TABLE)
            .placement(LegendPlacement.BOTTOM)
            .show_legend(True)
            .calcs(["lastNotNull"])
        )
        .tooltip(common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI).sort(SortOrder.DESCENDING))
    )
    _targets(built, queries)
    for name, colour in COLOURS.items():
        value = DynamicConfigValue("color", {"mode": "fixed", "fixedColor": colour})
        built.override_by_regexp(f"/^{name}( |$)/", [value])
    return built


def stacked(built: timeseries.Panel, *lines_on_top: str) -> timeseries.Panel:
    """Areas that add up; the series named ``lines_on_top`` stay lines."""
    built.stacking(common.StackingConfig().mode(StackingMode.NORMAL).group("stack")).fill_opacity(40)
    for name in lines_on_top:
        built.override_by_regexp(
            f"/^{name}( |$)/",
            [
                DynamicConfigValue("custom.stacking", {"mode": "none", "group": "line"}),
                DynamicConfigValue("custom.fillOpacity", 0),
                DynamicConfigValue("custom.lineWidth", 2),
            ],
        )
    return built


def number(
    title: str,
    text: str,
    unit: str,
    expression: str,
    *,
    steps: Sequence[tuple[float | None, str]] = ((None, "text"),),
    width: int = 4,
) -> stat.Panel:
    """The last value, large. ``steps``: (from this value on, colour)."""
    built = (
        stat.Panel()
        .title(title)
        .description(text)
        .datasource(SOURCE)
        .unit(unit)
        .span(width)
        .height(4)
        .color_mode(BigValueColorMode.VALUE)
        .graph_mode(BigValueGraphMode.NONE)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        .no_value("no data")
        .thresholds(
            dashboard.ThresholdsConfig()
            .mode(ThresholdsMode.ABSOLUTE)
            .steps([Threshold(value=value, color=colour) for value, colour in steps])  # type: ignore[arg-type]
        )
    )
    _targets(built, (query(expression, title),))
    return built


def instances(title: str, text: str, unit: str, expression: str, legend: str) -> bargauge.Panel:
    """One bar for each series of an instant query."""
    built = bargauge.Panel().title(title).description(text).datasource(SOURCE).unit(unit).span(12).height(5)
    built.min(0).reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"])).no_value("no data")
    _targets(built, (query(expression, legend).instant(),))
    return built


def _targets(built: Panel, queries: Sequence[prometheus.Dataquery]) -> None:
    for at, item in enumerate(queries):
        built.with_target(item.ref_id(chr(ord("A") + at)))


def quantile(share: float, metric: str, by: str = "model, instance") -> str:
    """Of a histogram; NaN, so nothing, while nothing is counted."""
    return f"histogram_quantile({share}, sum by (le, {by}) ({rate(metric + '_bucket')}))"


def _variable(name: str, label: str, values: str) -> dashboard.QueryVariable:
    return (
        dashboard.QueryVariable(name)
        .label(label)
        .datasource(SOURCE)
        .query(values)
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".*")
    )


def frame(uid: str, title: str, text: str, *panels: Panel) -> dashboard.Dashboard:
    """A dashboard with the variables that every query takes, linked with the others by its tag."""
    built = (
        dashboard.Dashboard(f"Tonnage / {title}")
        .uid(f"tonnage-{uid}")
        .description(text)
        .tags(["tonnage", "llm"])
        .time("now-30m", "now")
        .refresh("10s")
        .timezone("browser")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .readonly()
        .link(
            dashboard.DashboardLink("Tonnage")
            .type("dashboards")  # type: ignore[arg-type]
            .tags(["tonnage"])
            .as_dropdown(False)
            .include_vars(True)
            .keep_time(True)
        )
        .with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
        .with_variable(_variable("job", "Job", "label_values(tonnage_plan_info, job)"))
        .with_variable(_variable("model", "Model", 'label_values(tonnage_plan_info{job=~"$job"}, model)'))
        .with_variable(
            _variable(
                "instance",
                "Instance",
                'label_values(tonnage_plan_info{job=~"$job", model=~"$model"}, instance)',
            )
        )
    )
    for panel in panels:
        built.with_panel(panel)
    return built
