"""The dashboards against Grafana's own TypeScript types: ``make dashboard-types`` (needs node and npm).

Each JSON becomes a literal of the type ``Dashboard`` of @grafana/schema and is compiled with tsc. What the SDK
itself writes against these types is in ALLOWED, by the text of the finding; anything else fails.
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
ALLOWED = (
    # a string enum of TypeScript does not take its own value from a JSON literal
    """Type '"absolute"' is not assignable to type 'ThresholdsMode'""",
    # the SDK writes the field of interval variables (false) for every kind
    """'"auto"' does not exist in type 'VariableModel'""",
)
# A wrong value for each of these must be found, or the check checks nothing: (path, value).
MUTATIONS: tuple[tuple[tuple[str | int, ...], Any], ...] = (
    (("title",), 7),
    (("schemaVersion",), "39"),
    (("panels", 0, "gridPos", "h"), "four"),
    (("panels", 0, "type"), 3),
    (("templating", "list", 0, "name"), 1),
    (("time", "from"), 30),
)


def findings(node_modules: Path, dashboards: dict[str, Any]) -> list[str]:
    """What tsc says of each dashboard, with its name."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        (home / "node_modules").symlink_to(node_modules)
        for name, content in dashboards.items():
            text = json.dumps(content, indent=1)
            (home / f"{name}.ts").write_text(
                f'import type {{ Dashboard }} from "@grafana/schema";\nexport const it: Dashboard = {text};\n'
            )
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


def mutated(dashboard: dict[str, Any], path: tuple[str | int, ...], value: Any) -> dict[str, Any]:
    copy: dict[str, Any] = json.loads(json.dumps(dashboard))
    place: Any = copy
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return copy


def main() -> int:
    node_modules = Path(sys.argv[1]).resolve()
    dashboards = {path.stem: json.loads(path.read_text()) for path in sorted(DASHBOARDS.glob("*.json"))}
    wrong = [line for line in findings(node_modules, dashboards) if not any(known in line for known in ALLOWED)]
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
