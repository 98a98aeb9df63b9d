"""Terminal output of plans: colours, columns, and text wrapped to the terminal's width.

This module replaces rich. With its dependencies rich occupies 14 MB, more than the rest of the planner, and its
import takes longer than computing a plan.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TextIO

from tonnage.planner.errors import printable

# Style name -> SGR parameter of the terminal's escape sequence (ECMA-48, 8.3.117)
_STYLES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "cyan": "36"}
_GAP = " "  # separates table columns

_CLEAR = "\r\x1b[K"  # move to the start of the line, then erase to its end (ECMA-48, 8.3.41)

Cell = str | tuple[str, str]  # a cell: text, or (text, style)


class Screen:
    """A terminal, or another text file, to which plans are printed.

    Control characters in printed text are escaped as in a Python string.
    """

    def __init__(self, file: TextIO) -> None:
        self._file = file
        # Lines are wrapped only on a terminal. In a pipe or file, another program expects whole lines.
        self._wraps = file.isatty()
        # A set NO_COLOR turns off colours (no-color.org).
        self._styled = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        self.width = _width(file)

    def print(self, text: str = "", style: str = "") -> None:
        """Print one paragraph; on a terminal, wrap it to the width and indent its later lines by two spaces.

        Words are never broken, so that options and paths can be copied.
        """
        import textwrap  # lazy import, not needed for JSON output

        plain = printable(text)
        if not self._wraps:
            self.print_line(plain, style)
            return
        indent = plain[: len(plain) - len(plain.lstrip())]
        wrapper = textwrap.TextWrapper(
            self.width, subsequent_indent=f"{indent}  ", break_on_hyphens=False, break_long_words=False
        )
        for line in wrapper.wrap(plain) or [""]:
            print(self._in(style, line), file=self._file)

    def print_line(self, text: str, style: str = "") -> None:
        """Print `text` as one line, without wrapping it to the terminal's width."""
        print(self._in(style, printable(text)), file=self._file)

    def table(self, rows: Sequence[Sequence[Cell]], right: Collection[int] = (), titles: bool = False) -> None:
        """Print a table; each column is as wide as its widest cell.

        Args:
            rows: cells of each row, each a text or (text, style).
            right: indices of right-aligned columns.
            titles: whether the first row has titles, printed in bold.
        """
        split = [[(cell, "") if isinstance(cell, str) else cell for cell in row] for row in rows]
        table = [[(printable(text), style) for text, style in row] for row in split]
        widths = [
            max(map(len, column)) for column in zip(*([text for text, _ in row] for row in table), strict=True)
        ]
        for number, row in enumerate(table):
            cells = []
            for column, (text, style) in enumerate(row):
                space = " " * (widths[column] - len(text))
                shown = self._in("bold" if titles and not number else style, text)
                cells.append(space + shown if column in right else shown + space)
            print(_GAP.join(cells).rstrip(), file=self._file)

    def _in(self, style: str, text: str) -> str:
        return f"\x1b[{_STYLES[style]}m{text}\x1b[0m" if style and text and self._styled else text


@contextmanager
def busy(text: str) -> Iterator[None]:
    """Show `text` on stderr, if it is a terminal, while the `with` block runs, then erase the text."""
    shows = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    if shows:
        print(text, end="", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        if shows:
            print(_CLEAR, end="", file=sys.stderr, flush=True)


def aligned(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Return the lines of a text table; each column is as wide as its widest cell.

    Args:
        rows: the cells of each row.
        right: indices of right-aligned columns.
    """
    table = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]

    def line(row: Sequence[str]) -> str:
        cells = enumerate(zip(row, widths, strict=True))
        return _GAP.join(
            f"{cell:{'>' if place in right else '<'}{wide}}" for place, (cell, wide) in cells
        ).rstrip()

    return [line(row) for row in table]


def _width(file: TextIO) -> int:
    """Return the terminal's width in characters: $COLUMNS, else the terminal's own value, else 80."""
    if (said := os.environ.get("COLUMNS", "")).isdecimal() and int(said) > 0:
        return int(said)
    try:
        return os.get_terminal_size(file.fileno()).columns or 80
    except (OSError, ValueError):
        return 80
