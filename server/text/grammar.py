"""What the text of an answer must match. Engines compile it, parsers of tool calls make one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tonnage.planner.errors import TonnageError

# What a request is told that leaves no token to draw.
NO_TOKEN = "grammar, min_tokens, logit_bias and penalties together allow no token"

# Of a grammar's text in UTF-8, whatever its kind: what OpenAI allows the names and values of a JSON schema
# together (its guide on structured outputs: 120,000 characters).
MAX_BYTES = 120_000


class GrammarTooLong(TonnageError):
    """No engine sees it."""

    code = "invalid_value"


@dataclass(frozen=True, slots=True)
class Grammar:
    """What the text of an answer must match: ``json_schema`` and ``json_object`` (then ``text`` is empty or
    a JSON schema), ``regex``, ``choice`` (a JSON array of strings), ``lark``/EBNF as ``grammar``, or
    ``structural_tag``: xgrammar's JSON for text with parts in a given form (tool calls)."""

    kind: Literal["json_schema", "json_object", "regex", "choice", "grammar", "structural_tag"]
    text: str = ""

    def check_size(self) -> None:
        """Raises GrammarTooLong beyond `MAX_BYTES`."""
        size = len(self.text) if self.text.isascii() else len(self.text.encode(errors="replace"))
        if size > MAX_BYTES:
            raise GrammarTooLong(
                f"what the answer must match takes {size:,} bytes (a schema as JSON); "
                f"at most {MAX_BYTES:,} are compiled",
                field=self.kind,
            )
