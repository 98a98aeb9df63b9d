"""Grammars that constrain the text of an answer; engines compile them, and tool-call parsers create some."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tonnage.planner.errors import TonnageError

# Error message for a request whose constraints leave no token to sample.
NO_TOKEN = "grammar, min_tokens, logit_bias and penalties together allow no token"

# Limit of a grammar's text in bytes of UTF-8, for every kind of grammar. It is OpenAI's limit for the names and
# values in a JSON schema (its guide to structured outputs: 120,000 characters).
MAX_BYTES = 120_000


class GrammarTooLong(TonnageError):
    """Error for a grammar whose text exceeds the size limit and is therefore not sent to an engine."""

    code = "invalid_value"


@dataclass(frozen=True, slots=True)
class Grammar:
    """A constraint on the text of an answer.

    Attributes:
        kind: The language in which ``text`` is written. ``grammar`` is Lark or EBNF; ``structural_tag`` is
            xgrammar's JSON for text with parts in a given form, such as tool calls.
        text: A JSON schema, a regex, a JSON array of strings (``choice``) or a grammar; empty for
            ``json_object``.
    """

    kind: Literal["json_schema", "json_object", "regex", "choice", "grammar", "structural_tag"]
    text: str = ""

    def check_size(self) -> None:
        """Raise GrammarTooLong when the grammar's text has more than `MAX_BYTES` bytes."""
        size = len(self.text) if self.text.isascii() else len(self.text.encode(errors="replace"))
        if size > MAX_BYTES:
            raise GrammarTooLong(
                f"the structured-output constraint takes {size:,} bytes (a schema as JSON); "
                f"at most {MAX_BYTES:,} are compiled",
                field=self.kind,
            )
