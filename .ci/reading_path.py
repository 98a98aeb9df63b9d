"""Print the reading path of cache/README.md with its code lines, and the modules that it imports beside them.

    python .ci/reading_path.py

The path is the table "Reading order" of the README, and after it the table "Admission". A file name without a
folder is in the folder of the name before it. The closure has every module of ``tonnage.cache`` that a file of
the path imports, directly or not.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from code_lines import ROOT, code_lines

CACHE = ROOT / "cache"


def reading_path(heading: str = "Reading order") -> list[Path]:
    """Return the files in the table of a section of the README, in its order."""
    readme = (CACHE / "README.md").read_text(encoding="utf-8")
    section = readme.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    found: list[Path] = []
    for row in re.findall(r"^\| \d+ \|([^|]*)\|", section, re.MULTILINE):
        folder = CACHE
        for name in re.findall(r"`([\w/]+\.py)`", row):
            folder = (CACHE / name).parent if "/" in name else folder
            found.append(folder / Path(name).name)
    return found


def imported(path: Path) -> set[Path]:
    """Return the files of ``tonnage.cache`` that a file imports, also inside functions."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.update((node.module, *(f"{node.module}.{alias.name}" for alias in node.names)))
    found = set()
    for name in names:
        if name.startswith("tonnage.cache."):
            place = CACHE.joinpath(*name.split(".")[2:])
            found.update(each for each in (place.with_suffix(".py"), place / "__init__.py") if each.exists())
    return found


def closure(paths: list[Path]) -> list[Path]:
    """Return the files that ``paths`` import, directly or not, without the paths themselves."""
    seen, todo = set(paths), list(paths)
    while todo:
        new = imported(todo.pop()) - seen
        seen |= new
        todo += new
    return sorted(seen - set(paths))


def lines(paths: list[Path]) -> int:
    """Return the code lines of the files together."""
    return sum(map(code_lines, paths))


def main() -> None:
    """Print each file of the path with its code lines and the closure, then the same with admission."""
    path = reading_path()
    _show("listed", path)
    _show("imported beside", closure(path))
    mechanism = path + closure(path)
    print(f"{lines(mechanism):7,}  closure, {len(mechanism)} files\n")
    admission = reading_path("Admission")
    _show("admission, listed", admission)
    further = [each for each in closure(path + admission) if each not in mechanism]
    _show("imported beside", further)
    whole = mechanism + admission + further
    print(f"{lines(whole):7,}  closure with admission, {len(whole)} files")


def _show(title: str, files: list[Path]) -> None:
    for file in files:
        print(f"{code_lines(file):7,}  {file.relative_to(ROOT)}")
    print(f"{lines(files):7,}  {title}, {len(files)} files\n")


if __name__ == "__main__":
    main()
