"""Common parts of the dashboards: queries, panels, colours, variables, the frame."""

from __future__ import annotations

from collections.abc import Sequence

from grafana_foundation_sdk.builders import (
    bargauge,
    common,
    dashboard,
    heatmap,
    prometheus,
    stat,
    table,
    timeseries,
)
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
    DashboardRangeMapOptions,
    DashboardSpecialValueMapOptions,
    DataSourceRef,
    DynamicConfigValue,
    RangeMap,
    SpecialValueMap,
    SpecialValueMatch,
    Threshold,
    ThresholdsMode,
    ValueMap,
    ValueMapping,
    ValueMappingResult,
    VariableRefresh,
    VariableSort,
)
from grafana_foundation_sdk.models.heatmap import HeatmapColorMode
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
# Every query filters by the three variables, so that servers and models are never summed by accident.
ONE = 'job=~"$job", model=~"$model", instance=~"$instance"'
LEGEND = "{{model}} {{instance}}"

# Drift is the deviation of measured memory from its plan, as in the rule instance:tonnage_plan_drift:ratio.
# Weights and pool are exact figures, so both directions count. The process may stay below its plan.
_RATIO = "tonnage_memory_measured_to_planned_ratio"
DRIFT = (
    f'abs({_RATIO}{{{ONE}, component=~"weights|kv_pool"}} - 1) '
    f'or clamp_min({_RATIO}{{{ONE}, component="process"}} - 1, 0)'
)
DRIFT_STEPS = ((None, "green"), (0.03, "red"))  # the alert TonnagePlanDrift

# Limits of the alerts (prometheus/rules/thresholds.yml); with several series, the strictest counts.
FIRST_TOKEN_LIMIT = "min(tonnage:first_token_limit_seconds)"
TOKEN_LIMIT = "min(tonnage:token_limit_seconds)"
ERROR_LIMIT = "min(tonnage:error_limit_ratio)"

IN_USE = ((None, "green"), (0.95, "orange"))  # a full pool is good as long as a further request fits

# Colour steps of figures that are neither good nor bad: grey for zero, green for activity.
ACTIVE = ((None, "text"), (1e-9, "green"))
QUEUE = ((None, "green"), (1, "orange"), (20, "red"))
ROOM = ((None, "red"), (1, "orange"), (4, "green"))

# Colour by meaning: the same state has the same colour in every panel.
COLOURS = {
    "used": "blue",
    "cached": "super-light-blue",
    "free": "green",
    "reserved": "gray",
    "reserved, not yet held": "orange",
    "admit": "green",
    "wait": "orange",
    "never": "red",
    "stop": "green",
    "length": "blue",
    "aborted": "yellow",
    "rejected": "orange",
    "error": "red",
    "alert limit": "red",
}
DASHED = DynamicConfigValue("custom.lineStyle", {"fill": "dash", "dash": [10, 10]})

Panel = timeseries.Panel | stat.Panel | table.Panel | bargauge.Panel | heatmap.Panel


def reads(**texts: tuple[str, str]) -> ValueMap:
    """Return a mapping of values to (text, colour), such as ``reads(_0=("none", "red"))`` for 0."""
    found = enumerate(texts.items())
    return ValueMap(
        {name[1:]: ValueMappingResult(text, colour, index=at) for at, (name, (text, colour)) in found}
    )


def from_on(value: float, text: str, colour: str) -> RangeMap:
    """Return a mapping of all values from ``value`` on to a text and colour."""
    return RangeMap(DashboardRangeMapOptions(value, None, ValueMappingResult(text, colour, index=9)))


def nothing(text: str) -> SpecialValueMap:
    """Return a mapping of missing values and NaN, such as a quantile without data, to a text."""
    result = ValueMappingResult(text, "text", index=10)
    return SpecialValueMap(DashboardSpecialValueMapOptions(SpecialValueMatch.NULL_AND_NAN, result))


NO_TRAFFIC = (reads(_0=("no traffic", "text")), nothing("no traffic"))
# Value of "never" in tonnage.server.observe.metrics.headroom.
FOREVER_SECONDS = 86_400


def to(uid: str, title: str) -> dashboard.DashboardLink:
    """Return a link from a panel to another dashboard, with the same servers and time range."""
    link = dashboard.DashboardLink(title).type("link")  # type: ignore[arg-type]
    return link.url(f"/d/tonnage-{uid}?${{__url_time_range}}&${{__all_variables}}")


def query(expression: str, legend: str = LEGEND) -> prometheus.Dataquery:
    """Return a Prometheus query."""
    return prometheus.Dataquery().datasource(SOURCE).expr(expression).legend_format(legend)


def rate(metric: str, more: str = "") -> str:
    """Return the per-second rate of a metric over Grafana's rate interval, filtered by the variables."""
    return f"rate({metric}{{{ONE}{', ' + more if more else ''}}}[$__rate_interval])"


def lines(
    title: str, text: str, unit: str, *queries: prometheus.Dataquery, width: int = 12
) -> timeseries.Panel:
    """Return a panel with lines over time and the last value in its legend."""
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
    """Stack the panel's series as areas; the series named ``lines_on_top`` stay lines."""
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
    steps: Sequence[tuple[float | None, str]],
    mappings: Sequence[ValueMapping] = (),
    width: int = 4,
    more: dashboard.DashboardLink | None = None,
) -> stat.Panel:
    """Return a panel with the last value in large type.

    ``steps`` is (first value, colour) pairs, ``mappings`` is texts for special values, and ``more`` is the
    link behind the title.
    """
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
        .mappings([*mappings])
        .links([] if more is None else [more])
        .thresholds(_thresholds(steps))
    )
    _targets(built, (query(expression, title),))
    return built


def heat(title: str, text: str, metric: str, width: int = 12) -> heatmap.Panel:
    """Return a heatmap of a histogram in seconds: events per bucket over time.

    It shows a second maximum, which percentiles hide.
    """
    built = (
        heatmap.Panel().title(title).description(text).datasource(SOURCE).unit("short").span(width).height(9)
    )
    built.y_axis(heatmap.YAxisConfig().unit("s")).filter_values(heatmap.FilterValueRange().le(1e-9))
    built.color(
        heatmap.HeatmapColorOptions().mode(HeatmapColorMode.SCHEME).scheme("Oranges").steps(64).exponent(0.5)
    )
    built.show_legend().show_tooltip()
    counts = f"sum by (le) (increase({metric}_bucket{{{ONE}}}[$__rate_interval]))"
    _targets(built, (query(counts, "{{le}}").format(PromQueryFormat.HEATMAP),))
    return built


def instances(
    title: str,
    text: str,
    unit: str,
    expression: str,
    legend: str,
    *,
    steps: Sequence[tuple[float | None, str]],
    height: int = 5,
) -> bargauge.Panel:
    """Return a panel with one bar per series of an instant query."""
    built = bargauge.Panel().title(title).description(text).datasource(SOURCE).unit(unit).span(12)
    built.height(height).min(0).reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
    built.no_value("no data").thresholds(_thresholds(steps))
    _targets(built, (query(expression, legend).instant(),))
    return built


def _thresholds(steps: Sequence[tuple[float | None, str]]) -> dashboard.ThresholdsConfig:
    made = [Threshold(value=value, color=colour) for value, colour in steps]  # type: ignore[arg-type]
    return dashboard.ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(made)


def alert_line(built: timeseries.Panel) -> timeseries.Panel:
    """Draw the series ``alert limit`` dashed."""
    return built.override_by_regexp("/^alert limit$/", [DASHED])


def _targets(built: Panel, queries: Sequence[prometheus.Dataquery]) -> None:
    for at, item in enumerate(queries):
        built.with_target(item.ref_id(chr(ord("A") + at)))


def quantile(share: float, metric: str, by: str = "model, instance") -> str:
    """Return the quantile of a histogram; it is NaN, so not drawn, without data."""
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
    """Return a dashboard with the variables of all queries, linked with the other dashboards by its tag."""
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
