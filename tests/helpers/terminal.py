"""A terminal of any encoding."""

from __future__ import annotations

import io


class Terminal(io.TextIOWrapper):
    """It refuses what it cannot show."""

    def __init__(self, encoding: str) -> None:
        super().__init__(io.BytesIO(), encoding=encoding, errors="strict")

    def isatty(self) -> bool:
        return True

    def shown(self) -> str:
        self.flush()
        assert isinstance(self.buffer, io.BytesIO)
        return self.buffer.getvalue().decode(self.encoding)
