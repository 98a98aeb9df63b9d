"""Messages to and from the process that tries grammars, sent by an engine or the API process."""

from __future__ import annotations

from dataclasses import dataclass

from tonnage.server.text.grammar import Grammar


@dataclass(frozen=True, slots=True)
class Try:
    """A message to compile ``grammar`` in a trial; the message with the result has the same ``number``."""

    number: int
    grammar: Grammar


@dataclass(frozen=True, slots=True)
class Forget:
    """A message to cancel the grammar trial with this number; no result follows."""

    number: int


@dataclass(frozen=True, slots=True)
class Tried:
    """The result of a grammar trial: the grammar in llguidance's syntax (``source``), or an ``error`` message.

    The ``source`` of a structural tag is its own text. ``bytes`` is the memory that compiling took, in bytes.
    """

    number: int
    source: str | None = None
    error: str | None = None
    bytes: int = 0
