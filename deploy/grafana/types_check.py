"""Check the dashboards with Grafana's own TypeScript types: ``make dashboard-types`` (needs node and npm).

Each JSON file becomes a literal of the type ``Dashboard`` of @grafana/schema. The options and custom field
options of each panel become literals of that panel's types. tsc compiles them, and any error fails the check.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

DASHBOARDS = Path(__file__).resolve().parent / "dashboards"
# Panel type -> (name in @grafana/schema, whether it has custom field options).
PANELS = {
    "stat": ("Stat", False), "bargauge": ("BarGauge", False), "timeseries": ("TimeSeries", True),
    "heatmap": ("Heatmap", True),
}  # fmt: skip
# These types let a TypeScript string enum accept its value as a plain string, as in JSON.
_HEAD = """\
import type { Dashboard } from "@grafana/schema";
type Loose<T> = T extends string ? `${T}` : T extends object ? { [K in keyof T]: Loose<T[K]> } : T;
type Part<T> = T extends string ? `${T}` : T extends object ? { [K in keyof T]?: Part<T[K]> } : T;
"""
# Planted mistakes as (path, wrong value). The check is valid only if it finds each of them.
MUTATIONS: tuple[tuple[tuple[str | int, ...], Any], ...] = (
    (("title",), 7),
    (("schemaVersion",), "39"),
    (("panels", 0, "gridPos", "h"), "four"),
    (("panels", 0, "title"), 3),
    (("panels", 0, "options", "colorMode"), "colourful"),
    (("panels", 0, "fieldConfig", "defaults", "thresholds", "mode"), "relative"),
    (("panels", 6, "fieldConfig", "defaults", "custom", "spanNulls"), "no"),
    (("templating", "list", 0, "name"), 1),
    (("time", "from"), 30),
)


def findings(node_modules: Path, dashboards: dict[str, Any]) -> list[str]:
    """Return tsc's errors for the dashboards."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        (home / "node_modules").symlink_to(node_modules)
        for name, content in dashboards.items():
            (home / f"{name}.ts").write_text(_HEAD + "\n".join(_literals(content)))
        options = ["--noEmit", "--strict", "--skipLibCheck", "--target", "es2022", "--module", "esnext"]
        options += ["--moduleResolution", "bundler", "--ignoreConfig"]
        done = subprocess.run(
            [
                "node",
                str(node_modules / "typescript" / "bin" / "tsc"),
                *options,
                *(f"{n}.ts" for n in dashboards),
            ],
            cwd=home,
            capture_output=True,
            text=True,
        )
    return [line for line in done.stdout.splitlines() if re.match(r"\S+\.ts\(\d+,\d+\): error|error TS", line)]


def _literals(content: dict[str, Any]) -> list[str]:
    """Return TypeScript literals for the dashboard and for each panel's own options."""
    lines = [f"export const it: Loose<Dashboard> = {json.dumps(content, indent=1)};"]
    for at, panel in enumerate(content["panels"]):
        kind, has_fields = PANELS[panel["type"]]
        module = (
            f'"@grafana/schema/dist/esm/raw/composable/{panel["type"]}/panelcfg/x/{kind}PanelCfg_types.gen"'
        )
        options = json.dumps(panel.get("options", {}), indent=1)
        lines.append(f"export const options{at}: Part<import({module}).Options> = {options};")
        custom = panel["fieldConfig"]["defaults"].get("custom", {})
        if has_fields:
            of = f"import({module}).FieldConfig"
            lines.append(f"export const custom{at}: Part<{of}> = {json.dumps(custom, indent=1)};")
        elif custom:
            lines.append(f"export const custom{at}: never = {json.dumps(custom)};")
    return lines


def mutated(dashboard: dict[str, Any], path: tuple[str | int, ...], value: Any) -> dict[str, Any]:
    """Return a copy of ``dashboard`` with another value at ``path``."""
    copy: dict[str, Any] = json.loads(json.dumps(dashboard))
    place: Any = copy
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return copy


def main() -> int:
    """Check all dashboards and the planted mistakes."""
    node_modules = Path(sys.argv[1]).resolve()
    dashboards = {path.stem: json.loads(path.read_text()) for path in sorted(DASHBOARDS.glob("*.json"))}
    wrong = findings(node_modules, dashboards)
    for line in wrong:
        print(line)
    memory = dashboards["memory"]
    broken = {f"broken_{at}": mutated(memory, *mutation) for at, mutation in enumerate(MUTATIONS)}
    found = "\n".join(findings(node_modules, broken))
    missed = [mutation for at, mutation in enumerate(MUTATIONS) if f"broken_{at}.ts" not in found]
    for mutation in missed:
        print(f"not found by the types: {mutation}")
    print(f"{len(dashboards)} dashboards, {len(wrong)} findings; {len(MUTATIONS) - len(missed)} of "
          f"{len(MUTATIONS)} planted mistakes found")  # fmt: skip
    return 1 if wrong or missed else 0


if __name__ == "__main__":
    sys.exit(main())
