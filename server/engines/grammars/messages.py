"""Messages to and from the trial process, which compiles each new grammar once to check it against limits.

An engine process or the API process is on the other side.
"""

from __future__ import annotations

from dataclasses import dataclass

from tonnage.server.text.grammar import Grammar


@dataclass(frozen=True, slots=True)
class Try:
    """A message that asks the trial process to compile ``grammar``; the result has the same ``number``."""

    number: int
    grammar: Grammar


@dataclass(frozen=True, slots=True)
class Forget:
    """A message that asks the trial process to stop compiling a grammar; no result follows."""

    number: int


@dataclass(frozen=True, slots=True)
class Tried:
    """A message of the trial process: the grammar in llguidance's syntax (``source``), or an ``error`` message.

    The ``source`` of a structural tag is its own text. ``bytes`` is the memory that compiling the grammar took.
    """

    number: int
    source: str | None = None
    error: str | None = None
    bytes: int = 0
