"""What crosses the pipe to the process that tries grammars."""

from __future__ import annotations

from dataclasses import dataclass

from tonnage.server.text.grammar import Grammar


@dataclass(frozen=True, slots=True)
class Try:
    number: int
    grammar: Grammar


@dataclass(frozen=True, slots=True)
class Forget:
    """Whoever asked has hung up: kill it, and say nothing."""

    number: int


@dataclass(frozen=True, slots=True)
class Tried:
    """``source``: the grammar in llguidance's words (a structural tag: its own), None where ``error`` says what
    is wrong with it."""

    number: int
    source: str | None = None
    error: str | None = None
    bytes: int = 0  # what it took
