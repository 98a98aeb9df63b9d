"""Write the Grafana dashboards of dashboards/ (``--check``: fail when a committed file is stale).

Typed code, so that a wrong option fails here and not as an empty panel; the tests parse every query and hold
its metric names, labels and label values against a live server's /metrics.
"""

from __future__ import annotations

import sys
from pathlib import Path

from grafana_foundation_sdk.builders import common, dashboard, prometheus, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import (
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
    VariableRefresh,
    VariableSort,
)

FOLDER = Path(__file__).resolve().parent / "dashboards"
SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
# Every query takes the two variables, so that servers and models are never added up by accident.
ONE = 'model=~"$model", instance=~"$instance"'

# Colour by meaning: the same state has the same colour in every panel.
COLOURS = {
    "used": "blue",
    "cached": "super-light-blue",
    "free": "green",
    "promised, not yet held": "orange",
    "admit": "green",
    "wait": "orange",
    "never": "red",
}


def query(expression: str, legend: str) -> prometheus.Dataquery:
    return prometheus.Dataquery().datasource(SOURCE).expr(expression).legend_format(legend)


def panel(title: str, text: str, unit: str, *queries: prometheus.Dataquery) -> timeseries.Panel:
    """Half the width of the dashboard; a legend with the last value."""
    built = (
        timeseries.Panel()
        .title(title)
        .description(text)
        .datasource(SOURCE)
        .unit(unit)
        .min(0)
        .span(12)
        .height(10)
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
    for number, item in enumerate(queries):
        built.with_target(item.ref_id(chr(ord("A") + number)))
    return built


def coloured(built: timeseries.Panel) -> timeseries.Panel:
    for name, colour in COLOURS.items():
        value = DynamicConfigValue("color", {"mode": "fixed", "fixedColor": colour})
        built.override_by_regexp(f"/^{name}( |$)/", [value])
    return built


def plan_against_reality() -> timeseries.Panel:
    built = panel(
        "Plan against reality",
        "tonnage_memory_planned_bytes (dashed; revision 0, computed before anything was loaded) and "
        "tonnage_memory_measured_bytes, by component; the process at its peak against the sum of the plan. "
        "Lines of one component that part are a plan that is wrong.",
        "bytes",
        query(f'tonnage_memory_planned_bytes{{{ONE}, component!="free"}}', "{{component}} planned"),
        query(f'tonnage_memory_measured_bytes{{{ONE}, component!="free"}}', "{{component}}"),
        query(
            f'sum by (model, instance) (tonnage_memory_planned_bytes{{{ONE}, component!="free"}})',
            "process planned",
        ),
        query(f"tonnage_process_memory_peak_bytes{{{ONE}}}", "process peak"),
    )
    dashed = DynamicConfigValue("custom.lineStyle", {"fill": "dash", "dash": [10, 10]})
    return built.override_by_regexp("/ planned$/", [dashed])


def pool_states() -> timeseries.Panel:
    built = panel(
        "KV pool by state",
        "tonnage_pool_bytes, stacked: used by running requests, cached (reusable prefixes, evicted when "
        "needed) and free. The line is tonnage_pool_promised_unused_bytes: promised to admitted requests, not "
        "yet held. used plus the line never exceeds the stack.",
        "bytes",
        query(f"tonnage_pool_bytes{{{ONE}}}", "{{state}}"),
        query(f"tonnage_pool_promised_unused_bytes{{{ONE}}}", "promised, not yet held"),
    )
    built.stacking(common.StackingConfig().mode(StackingMode.NORMAL).group("pool")).fill_opacity(40)
    built.override_by_name(
        "promised, not yet held",
        [
            DynamicConfigValue("custom.stacking", {"mode": "none", "group": "pool"}),
            DynamicConfigValue("custom.fillOpacity", 0),
            DynamicConfigValue("custom.lineWidth", 2),
        ],
    )
    return coloured(built)


def admission_decisions() -> timeseries.Panel:
    return coloured(
        panel(
            "Admission decisions",
            "tonnage_admission_decisions_total per second, by outcome and reason: admit, wait (it fits, but "
            "not now) and never (it cannot fit at all; retrying is useless).",
            "reqps",
            query(
                "sum by (outcome, reason) "
                f"(rate(tonnage_admission_decisions_total{{{ONE}}}[$__rate_interval]))",
                "{{outcome}} {{reason}}",
            ),
        )
    )


def latency() -> timeseries.Panel:
    def quantile(share: float, metric: str) -> str:
        rates = f"sum by (le) (rate({metric}_bucket{{{ONE}}}[$__rate_interval]))"
        return f"histogram_quantile({share}, {rates})"

    return panel(
        "Latency",
        "Median and 95th percentile of tonnage_time_to_first_token_seconds and of "
        "tonnage_inter_token_latency_seconds. Empty while nothing is generated.",
        "s",
        *(
            query(quantile(share, f"tonnage_{metric}_seconds"), f"{name} p{100 * share:.0f}")
            for metric, name in (
                ("time_to_first_token", "first token"),
                ("inter_token_latency", "between tokens"),
            )
            for share in (0.5, 0.95)
        ),
    ).no_value("no traffic")


def variable(name: str, label: str, values: str) -> dashboard.QueryVariable:
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


def memory_dashboard() -> dashboard.Dashboard:
    return (
        dashboard.Dashboard("Tonnage: plan, admit, measure")
        .uid("tonnage-memory")
        .description("What was planned, what admission promised, and what is really held.")
        .tags(["tonnage", "llm", "memory"])
        .time("now-30m", "now")
        .refresh("10s")
        .timezone("browser")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .readonly()
        .with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
        .with_variable(variable("model", "Model", "label_values(tonnage_plan_info, model)"))
        .with_variable(
            variable("instance", "Instance", 'label_values(tonnage_plan_info{model=~"$model"}, instance)')
        )
        .with_panel(plan_against_reality())
        .with_panel(pool_states())
        .with_panel(admission_decisions())
        .with_panel(latency())
    )


def rendered() -> dict[str, str]:
    """File name -> JSON text of every dashboard."""
    encoder = JSONEncoder(sort_keys=True, indent=2)
    return {"tonnage.json": encoder.encode(memory_dashboard().build()) + "\n"}


def main() -> int:
    for name, text in rendered().items():
        path = FOLDER / name
        if "--check" in sys.argv:
            if not path.is_file() or path.read_text() != text:
                print(f"{path.name} is stale; run make dashboard", file=sys.stderr)
                return 1
        else:
            path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
