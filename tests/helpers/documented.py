"""Commands that the documentation shows, run: ``python tests/helpers/documented.py`` writes what they print.

A block that is run begins with ```` ```console ````; each line of it that begins with ``$ `` is a command, the
lines below are what it prints, or why it refuses. They run in a folder with the models of the page
(``Qwen/Qwen3-8B/config.json`` ...), so that a name stands for the config of the hub, ``traces`` and ``logs``;
``tonnage`` is this checkout's. ``[...]`` alone on a line: lines left out, nothing else is.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CUT = "[...]"
_BLOCK = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def pages() -> list[Path]:
    """Every page with such a block."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [page for page in found if _BLOCK.search(page.read_text())]


@contextlib.contextmanager
def models() -> Iterator[None]:
    """In a folder with what the commands name."""
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
        os.chdir(place)
        try:
            yield
        finally:
            os.chdir(before)


def output(command: str) -> list[str]:
    """Lines that ``command`` prints, as to a pipe."""
    from tonnage.server.cli import main

    words = shlex.split(command)
    assert words[0] == "tonnage", command
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        main(words[1:])
    return (out.getvalue() or err.getvalue()).rstrip("\n").split("\n")  # err: a refusal; else how far it is


def again(page: str) -> str:
    """``page`` as it is when its commands are run; call it inside `models`."""
    return _BLOCK.sub(lambda block: f"```console\n{_block(block[1])}```", page)


def _block(text: str) -> str:
    made: list[str] = []
    shown: list[str] = []
    command = ""

    def end() -> None:
        if command:
            made.extend(_cut(output(command), shown))

    for line in text.splitlines():
        if line.startswith("$ "):
            end()
            command, shown = line[2:], []
            made.append(line)
        else:
            shown.append(line)
    end()
    return "".join(f"{line}".rstrip() + "\n" for line in made)


def _cut(lines: list[str], shown: list[str]) -> list[str]:
    """``lines`` without what ``shown`` leaves out: before ``[...]`` as many as are shown, after it as well."""
    lines = [line.rstrip() for line in lines]
    if CUT not in shown:
        return lines
    first, last = shown.index(CUT), len(shown) - shown.index(CUT) - 1
    return [*lines[:first], CUT, *lines[len(lines) - last :]]


def main() -> None:
    with models():
        for page in pages():
            text = page.read_text()
            made = again(text)
            if made != text:
                page.write_text(made)
                print(f"written: {page.relative_to(ROOT)}")


if __name__ == "__main__":
    sys.exit(main())
