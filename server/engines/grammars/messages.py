"""Messages between an engine or the API process and the process that tries grammars."""

from __future__ import annotations

from dataclasses import dataclass

from tonnage.server.text.grammar import Grammar


@dataclass(frozen=True, slots=True)
class Try:
    """A request to try compiling ``grammar``; the result carries the same ``number``."""

    number: int
    grammar: Grammar


@dataclass(frozen=True, slots=True)
class Forget:
    """A cancellation of the trial with this number; no result follows."""

    number: int


@dataclass(frozen=True, slots=True)
class Tried:
    """The result of a trial: the converted grammar in ``source``, or an ``error`` message.

    The ``source`` of a structural tag is its own text. ``bytes`` is the memory that compilation took.
    """

    number: int
    source: str | None = None
    error: str | None = None
    bytes: int = 0
