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
    """Return the docstrings of modules, classes and functions, each after its signature."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    return [
        (f"{name}:{getattr(node, 'lineno', 1)}", f"{_signature(node)}: {text}")
        for name, source in sources(*PACKAGES)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, kinds) and (text := ast.get_docstring(node))
    ]


def _signature(node: ast.AST) -> str:
    """Return a class's name, or a function's name, arguments and return type; ``(module)`` for a module."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        returned = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        return f"{node.name}({ast.unparse(node.args)}){returned}"
    return node.name if isinstance(node, ast.ClassDef) else "(module)"


def comments() -> list[Text]:
    """Return the comments; adjacent lines that are comments only are one comment."""
    found: list[Text] = []
    for name, source in sources(*PACKAGES):
        lines, last = source.splitlines(), -2  # ``last`` is the last line that is a comment only
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type != tokenize.COMMENT or token.string.startswith(
                ("# fmt:", "# type:", "# noqa", "#!", "# --")
            ):
                continue
            line, text = token.start[0], token.string.lstrip("# ")
            alone = not lines[line - 1][: token.start[1]].strip()
            if alone and line == last + 1:
                found[-1] = (found[-1][0], f"{found[-1][1]} {text}")
            else:
                found.append((f"{name}:{line}", text))
            last = line if alone else last
    return found


def messages() -> list[Text]:
    """Return the texts of raised errors as a user sees them: ``field: message (hint)``.

    A value in the text is shown as the expression that gives it, for example `{len(shards)}`.
    """
    return [
        (f"{name}:{node.lineno}", _with_field(node.exc, text))
        for name, source in sources(*PACKAGES)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)
        for argument in node.exc.args
        if len((text := _shown(argument)).split()) >= _MIN_MESSAGE_WORDS
    ]


def _with_field(call: ast.Call, message: str) -> str:
    """Return a message with the field and the hint that the call of the error's class gives."""
    given = {each.arg: _shown(each.value) or "{}" for each in call.keywords}
    field = f"{given['field']}: " if "field" in given else ""
    hint = f" ({given['hint']})" if "hint" in given else ""
    return f"{field}{message}{hint}"


def _shown(node: ast.expr) -> str:
    """Return a string literal or an f-string as text, or '' for another expression."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_part, node.values))
    return ""


def _part(part: ast.expr) -> str:
    """Return a part of an f-string: its text, or the expression of a value, which hints at the value."""
    if isinstance(part, ast.FormattedValue):
        return f"{{{ast.unparse(part.value)[:30]}}}"
    return str(part.value) if isinstance(part, ast.Constant) else "{}"


def names_of_tests() -> list[Text]:
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
    kinds = {"docstrings": docstrings, "comments": comments, "messages": messages, "tests": names_of_tests}
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
