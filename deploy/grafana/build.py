"""Write the Grafana dashboards in dashboards/ (``--check``: fail if a committed file is out of date).

The dashboards are typed code, so a wrong option fails here instead of as an empty panel. The tests parse
every query and compare its metric names, labels and label values with a live server's /metrics.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

FOLDER = Path(__file__).resolve().parent / "dashboards"


def rendered() -> dict[str, str]:
    """Return the JSON text of every dashboard by file name."""
    sys.path.insert(0, str(FOLDER.parent))  # the panels are not an installed package
    try:
        from panels.admission import admission
        from panels.fleet import fleet
        from panels.latency import latency
        from panels.memory import memory
        from panels.overview import overview
        from panels.prefix_cache import prefix_cache
    finally:
        sys.path.remove(str(FOLDER.parent))
    return {
        f"{build.__name__.replace('_', '-')}.json": _written(build().build()) + "\n"
        for build in (overview, memory, admission, latency, prefix_cache, fleet)
    }


def _written(built: Dashboard) -> str:
    """Return the JSON of a dashboard, converted from the SDK's schema (10.1) to Grafana 13.2.

    types_check.py validates the result.
    """
    content = json.loads(JSONEncoder().encode(built))
    content.pop("style", None)  # a user setting since
    for variable in content["templating"]["list"]:
        for name in ("id", "auto", "auto_min", "auto_count"):
            variable.pop(name, None)
    for panel in content["panels"]:
        if panel["type"] == "heatmap":
            panel["options"]["tooltip"] = {"mode": "single"}  # called "show" before 10.4
    return json.dumps(content, sort_keys=True, indent=2)


def main() -> int:
    """Write all dashboards, or check the committed files."""
    texts = rendered()
    if "--check" in sys.argv:
        stale = [name for name, text in texts.items() if _committed(name) != text]
        for name in stale:
            print(f"{name} is stale; run make dashboard", file=sys.stderr)
        return 1 if stale else 0
    for name, text in texts.items():
        (FOLDER / name).write_text(text)
    return 0


def _committed(name: str) -> str:
    path = FOLDER / name
    return path.read_text() if path.is_file() else ""


if __name__ == "__main__":
    sys.exit(main())
