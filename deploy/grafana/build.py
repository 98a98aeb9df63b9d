"""Write the Grafana dashboards of dashboards/ (``--check``: fail when a committed file is stale).

Typed code, so that a wrong option fails here and not as an empty panel; the tests parse every query and hold
its metric names, labels and label values against a live server's /metrics.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

FOLDER = Path(__file__).resolve().parent / "dashboards"


def rendered() -> dict[str, str]:
    """File name -> JSON text of every dashboard."""
    sys.path.insert(0, str(FOLDER.parent))  # the panels are no installed package
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
    """JSON, with what Grafana has moved since the schema that the SDK writes (10.1): as of 13.2
    (types_check.py)."""
    content = json.loads(JSONEncoder().encode(built))
    content.pop("style", None)  # the user's now
    for variable in content["templating"]["list"]:
        for name in ("id", "auto", "auto_min", "auto_count"):
            variable.pop(name, None)
    for panel in content["panels"]:
        if panel["type"] == "heatmap":
            panel["options"]["tooltip"] = {"mode": "single"}  # show, before 10.4
    return json.dumps(content, sort_keys=True, indent=2)


def main() -> int:
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
