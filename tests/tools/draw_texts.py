"""Draw docstrings, comments, error messages and test names at random, to be judged by readers without the code.

    python tests/tools/draw_texts.py --seed 1 [--docstrings 100] [--comments 30] [--messages 40] [--tests 40]

Prints each text alone, with a number. ``--where`` adds the file and line of each.
"""

from __future__ import annotations

import argparse
import ast
import io
import random
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("planner", "cache", "server")
_MIN_MESSAGE_WORDS = 4  # shorter strings are names, not sentences

Text = tuple[str, str]  # where, text


def sources(*folders: str) -> Iterator[tuple[str, str]]:
    """Yield the name and the source of each Python file below `folders`."""
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")


def docstrings() -> list[Text]:
    """Return the docstrings of modules, classes and functions."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    return [
        (f"{name}:{getattr(node, 'lineno', 1)}", f"{getattr(node, 'name', '(module)')}: {text}")
        for name, source in sources(*PACKAGES)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, kinds) and (text := ast.get_docstring(node))
    ]


def comments() -> list[Text]:
    """Return the comments, with adjacent comment lines joined."""
    found: list[Text] = []
    for name, source in sources(*PACKAGES):
        last = -2
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type != tokenize.COMMENT or token.string.startswith(
                ("# fmt", "# type", "# noqa", "#!", "# --")
            ):
                continue
            line, text = token.start[0], token.string.lstrip("# ")
            if line == last + 1 and not source.splitlines()[line - 1][: token.start[1]].strip():
                found[-1] = (found[-1][0], f"{found[-1][1]} {text}")
            else:
                found.append((f"{name}:{line}", text))
            last = line
    return found


def messages() -> list[Text]:
    """Return the texts of raised errors; a value in them is shown as `{}`."""
    return [
        (f"{name}:{node.lineno}", text)
        for name, source in sources(*PACKAGES)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)
        for argument in node.exc.args
        if len((text := _shown(argument)).split()) >= _MIN_MESSAGE_WORDS
    ]


def _shown(node: ast.expr) -> str:
    """Return a string literal or an f-string as text, or '' for another expression."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
    return ""


def test_names() -> list[Text]:
    """Return the names of the test functions."""
    return [
        (f"{name}:{node.lineno}", node.name)
        for name, source in sources("tests")
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    ]


def main() -> None:
    """Draw the texts and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--where", action="store_true", help="print the file and line of each text")
    kinds = {"docstrings": docstrings, "comments": comments, "messages": messages, "tests": test_names}
    for kind, number in zip(kinds, (100, 30, 40, 40), strict=True):
        parser.add_argument(f"--{kind}", type=int, default=number)
    given = parser.parse_args()
    for kind, texts in kinds.items():
        every = texts()
        count = min(getattr(given, kind), len(every))
        print(f"== {kind}: {count} of {len(every)}, seed {given.seed}")
        for number, (where, text) in enumerate(random.Random(given.seed).sample(every, count), 1):
            print(f"[{number}]{' ' + where if given.where else ''} {text}\n")


if __name__ == "__main__":
    main()
