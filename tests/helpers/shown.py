"""Every command that README, the documentation and the packages' READMEs show.

Commands stand in ``console`` fences (lines that begin with ``$ ``, with their output), in ``sh`` fences (one
per line), and in code spans that begin with a program's name. A line that ends in a backslash continues in the
next; `` #`` begins a comment.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = (
    "bash", "curl", "docker", "eval", "git", "helm", "hf", "kubectl", "make", "npm", "npx", "pip", "pipx",
    "promtool", "python", "python3", "sglang", "sudo", "systemctl", "tonnage", "uv", "uvx", "vllm",
)  # fmt: skip

# A program, a script with options, or variables in front of one.
_BEGINS = re.compile(rf"(?:[A-Z_]+=\S+ )*(?:(?:\.venv/bin/)?(?:{'|'.join(PROGRAMS)})|[\w/]+\.py(?= --))\s+\S")
_FENCE = re.compile(r"^```+ *(\w*)[^\n]*\n(.*?)^```+$", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"(?<!`)`([^`]+)`(?!`)")
_COMMENT = re.compile(r"\s+#(?:\s.*)?$")


@dataclass(frozen=True)
class Shown:
    """``fence``: console, sh, or empty for a code span."""

    page: str
    line: int
    command: str
    fence: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.command}"


def pages() -> list[Path]:
    """Return the Markdown pages for users; CHANGELOG.md, which describes the past, is left out."""
    return [
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
        *sorted((ROOT / "docs").rglob("*.md")),
        *(ROOT / folder / "README.md" for folder in ("planner", "cache", "server", "benchmarks")),
    ]


def shown(page: Path) -> list[Shown]:
    """Return the commands of a page in their order."""
    text, name = page.read_text(), str(page.relative_to(ROOT))
    found = []
    for fence in _FENCE.finditer(text):
        if fence[1] in ("console", "sh"):
            first = text[: fence.start(2)].count("\n") + 1
            found += [Shown(name, first + at, line, fence[1]) for at, line in _lines(fence[2], fence[1])]
    prose = _FENCE.sub(lambda fence: "\n" * fence[0].count("\n"), text)
    for span in _SPAN.finditer(prose):
        command = " ".join(span[1].split())
        if _BEGINS.match(command):
            found.append(Shown(name, prose[: span.start()].count("\n") + 1, command, ""))
    return sorted(found, key=lambda each: each.line)


def _lines(block: str, fence: str) -> Iterator[tuple[int, str]]:
    """Yield (line number, command) of a fenced block."""
    command, begun = "", 0
    for number, line in enumerate(block.splitlines()):
        if command:
            command += " " + line.strip()
        elif fence == "console" and line.startswith("$ "):
            command, begun = line[2:], number
        elif fence == "sh" and line.strip() and not line.startswith("#"):
            command, begun = line, number
        if command.endswith("\\"):
            command = command[:-1].rstrip()
        elif command:
            yield begun, _COMMENT.sub("", command)
            command = ""


def how_exact(what: str) -> tuple[str, str]:
    """(against, result) of the row of the README's table that begins with ``what``."""
    rows = re.findall(
        rf"^\| {re.escape(what)}[^|]* \| (.*) \| (.*) \|$", (ROOT / "README.md").read_text(), re.M
    )
    assert len(rows) == 1, rows
    return rows[0]


def serve_lines() -> list[list[str]]:
    """Return the arguments of every ``vllm serve`` in a fenced block, the model first."""
    found = [command.command for page in pages() for command in shown(page) if command.fence]
    return [shlex.split(command)[2:] for command in found if command.startswith("vllm serve ")]


def stray(page: Path) -> list[str]:
    """Return commands in indented blocks and other fences, where no test would run them."""
    text = page.read_text()
    found = [
        line
        for fence in _FENCE.finditer(text)
        if fence[1] not in ("console", "sh")
        for line in fence[2].splitlines()
    ]
    prose = _FENCE.sub("", text)
    found += [line for line in prose.splitlines() if line.startswith("    ")]
    return [line.strip() for line in found if _BEGINS.match(line.strip()) or line.strip().startswith("$ ")]
