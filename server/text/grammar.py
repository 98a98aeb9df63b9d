"""What the text of an answer must match. Engines compile it, parsers of tool calls make one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# What a request is told that leaves no token to draw.
NO_TOKEN = "grammar, min_tokens, logit_bias and penalties together allow no token"


@dataclass(frozen=True, slots=True)
class Grammar:
    """What the text of an answer must match: ``json_schema`` and ``json_object`` (then ``text`` is empty or
    a JSON schema), ``regex``, ``choice`` (a JSON array of strings), ``lark``/EBNF as ``grammar``, or
    ``structural_tag``: xgrammar's JSON for text with parts in a given form (tool calls)."""

    kind: Literal["json_schema", "json_object", "regex", "choice", "grammar", "structural_tag"]
    text: str = ""
