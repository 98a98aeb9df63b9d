"""Write the package list of pyproject.toml from the folders (``--check``: fail if it is out of date)."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOP = ROOT / "planner" / "_tonnage"  # the package tonnage itself (package-dir of pyproject.toml)


def packages() -> list[str]:
    """Return ``tonnage`` and ``tonnage.<path>`` for every folder with an __init__.py in the three packages."""
    found = ["tonnage"]
    for top in ("planner", "cache", "server"):
        for init in (ROOT / top).rglob("__init__.py"):
            if init.parent != TOP:
                found.append("tonnage." + ".".join(init.parent.relative_to(ROOT).parts))
    return sorted(found)


def main() -> int:
    """Write the list, or check it."""
    path = ROOT / "pyproject.toml"
    text = path.read_text()
    lines = "packages = [\n" + "".join(f'    "{name}",\n' for name in packages()) + "]\n"
    new = re.sub(r"(# packages: begin\n).*?(# packages: end)", rf"\g<1>{lines}\g<2>", text, flags=re.S)
    if "--check" in sys.argv:
        if new != text:
            print("pyproject.toml: package list is out of date; run python .ci/packages.py", file=sys.stderr)
            return 1
        return 0
    path.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
