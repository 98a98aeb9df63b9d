"""llguidance: a request's grammar in its words, and its limits. No torch, no numpy.

Source: llguidance 1.7 (github.com/guidance-ai/llguidance): docs/syntax.md, docs/json_schema.md and
parser/src/api.rs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tonnage.server.engines.errors import Refused
from tonnage.server.text.grammar import Grammar

if TYPE_CHECKING:
    import llguidance  # of the extra grammar: imported where it is used

# Of one matcher; what needs more ends with an error of its own. With the demo model's vocabulary the defaults
# (in brackets) let one mask take 0.8 to 1.4 s where a rule has 4,000 to 8,000 parts that may be empty; with
# these the dearest that was found takes 0.1 s. A mask of an ordinary schema takes 0.01 to 5 ms.
LIMITS: dict[str, Any] = {
    "step_max_items": 10_000,  # (50,000)
    "max_grammar_size": 12_000,  # (500,000) symbols: a schema of 1,000 optional properties has 10,000
    "max_lexer_states": 10_000,  # (250,000) of 1 to 2 KB each
    "verbose_errors": False,  # what they add is the parser's state
}

# White space only where json.dumps puts it: small models else write blanks until max_tokens. What llguidance
# does not know of a schema (uniqueItems, if ...) is no reason to refuse it, and oneOf is read as anyOf: so does
# xgrammar.
_JSON: Any = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "lenient": True,
    "coerce_one_of": True,
}

# Keywords of a JSON schema below which schemas stand, by name and otherwise. Not those of which several hold at
# once (allOf, not, if): were each closed, nothing would suit all of them.
_NAMED = ("properties", "patternProperties", "$defs", "definitions")
_NESTED = ("items", "prefixItems", "anyOf", "oneOf", "additionalProperties")


class GrammarError(Refused):
    """The grammar of a request is not understood, or asks more than this server gives."""


def tokenizer_of(folder: Path, vocab_size: int) -> llguidance.LLTokenizer:
    """Of the tokenizer.json in ``folder``. Raises ImportError, and whatever its content leads to."""
    import llguidance  # of the extra grammar

    text = (folder / "tokenizer.json").read_text(
        encoding="utf-8"
    )  # a path that is none would be looked up on the hub
    try:
        return llguidance.LLTokenizer(text, n_vocab=vocab_size)
    except ValueError:  # more tokens than the model has logits: those beyond are never drawn
        return llguidance.LLTokenizer(text)


def special_tokens(tokenizer: llguidance.LLTokenizer) -> list[int]:
    """Those that stand for no text."""
    return [token for token in range(tokenizer.vocab_size) if tokenizer.is_special_token(token)]


class _Bytes:
    """A tokenizer of single bytes."""

    bos_token_id = None

    def __init__(self, special: list[str]) -> None:
        self.tokens = [bytes([byte]) for byte in range(256)] + [token.encode() for token in special]
        self.special_token_ids = list(range(256, len(self.tokens)))
        self.eos_token_id = 256

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def byte_tokenizer(special: list[str]) -> llguidance.LLTokenizer:
    """A tokenizer of single bytes and ``special`` tokens: what grammars are tried with, in 0.1 MiB. A whole
    vocabulary takes 36 MiB for 49,152 tokens."""
    import llguidance  # of the extra grammar

    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Bytes(special or ["<eos>"])))


def matcher_of(tokenizer: llguidance.LLTokenizer, source: str) -> llguidance.LLMatcher:
    """At the start of an answer. Raises GrammarError."""
    import llguidance  # of the extra grammar

    limits = llguidance.LLParserLimits(**LIMITS)
    matcher = llguidance.LLMatcher(tokenizer, source, log_level=0, limits=limits)
    check(matcher)
    return matcher


def check(matcher: llguidance.LLMatcher) -> None:
    """Raise GrammarError where llguidance has given up."""
    if matcher.is_error():
        raise GrammarError(first_line(matcher.get_error()))


def first_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0][:300] if lines else "not understood"


def parts_of(grammar: Grammar) -> list[Grammar]:
    """What is to be tried of ``grammar``: itself, or the schemas of the functions in a structural tag. Raises
    GrammarError, and whatever a text leads to that is no tag."""
    if grammar.kind != "structural_tag":
        return [grammar]
    level, found = [json.loads(grammar.text)], []
    while level:
        node = level.pop()
        if isinstance(node, list):
            level += node
        elif isinstance(node, dict):
            schema = node.get("json_schema")
            if isinstance(schema, dict | bool):
                found.append(Grammar("json_schema", json.dumps(schema)))
            level += [value for key, value in node.items() if key != "json_schema"]
    return found


def source_of(grammar: Grammar) -> str:
    """``grammar`` in llguidance's words. Raises ValueError, and whatever its converters raise."""
    # Of the extra grammar.
    from llguidance import LLMatcher as make
    from llguidance.gbnf_to_lark import gbnf_to_lark

    if grammar.kind in ("json_schema", "json_object"):
        schema = json.loads(grammar.text) if grammar.text else {"type": "object"}
        return make.grammar_from_json_schema(json.dumps(closed(schema)), overrides=_JSON)
    if grammar.kind == "regex":
        return make.grammar_from_regex(grammar.text)
    if grammar.kind == "choice":
        wanted = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in json.loads(grammar.text))
        return make.grammar_from_lark(f"start: {wanted}")
    if "::=" in grammar.text:
        return make.grammar_from_lark(gbnf_to_lark(grammar.text))
    return make.grammar_from_lark(grammar.text)


def closed(schema: Any) -> Any:
    """``schema`` where objects have no properties but those it names: what it does not speak of is none, as
    OpenAI's strict mode wants it said and xgrammar takes it. Raises RecursionError."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = dict(schema)
    for name in _NAMED:
        if isinstance(made.get(name), dict):
            made[name] = {key: closed(each) for key, each in made[name].items()}
    for name in _NESTED:
        if name in made:
            made[name] = closed(made[name])
    if made.get("properties") or made.get("patternProperties"):
        said = "additionalProperties" in made or "unevaluatedProperties" in made
        made.setdefault("additionalProperties", said)
    return made
