"""Count lines of code: lines with a token other than a comment, without docstrings.

    python .ci/code_lines.py [PATH ...]

It prints one line per folder and the sum last; a file argument is counted alone. The default is the three
packages.
"""

from __future__ import annotations

import ast
import signal
import sys
import tokenize
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("planner", "cache", "server")
_NO_CODE = {
    tokenize.COMMENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
    tokenize.INDENT,
    tokenize.NEWLINE,
    tokenize.NL,
}


def code_lines(path: Path) -> int:
    """Return the number of lines with code in a Python file."""
    lines: set[int] = set()
    with tokenize.open(path) as file:
        for token in tokenize.generate_tokens(file.readline):
            if token.type not in _NO_CODE:
                lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            text = first.value if isinstance(first, ast.Expr) else None
            if isinstance(text, ast.Constant) and isinstance(text.value, str):
                lines.difference_update(range(text.lineno, (text.end_lineno or text.lineno) + 1))
    return len(lines)


def main(arguments: list[str]) -> None:
    """Print the count of each folder, and the sum last."""
    counts: dict[Path, int] = defaultdict(int)
    for path in [Path(each) for each in arguments] or [ROOT / package for package in PACKAGES]:
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            counts[file.parent if path.is_dir() else file] += code_lines(file)
    for place, count in counts.items():
        resolved = place.resolve()
        print(f"{count:7,}  {resolved.relative_to(ROOT) if resolved.is_relative_to(ROOT) else place}")
    print(f"{sum(counts.values()):7,}  all")


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends this script without a traceback
    main(sys.argv[1:])
