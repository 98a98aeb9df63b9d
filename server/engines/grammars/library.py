"""Conversion of a request's grammar to llguidance's syntax, and the limits of llguidance's matchers.

It imports neither torch nor numpy. Source: llguidance 1.7 (github.com/guidance-ai/llguidance): docs/syntax.md,
docs/json_schema.md and parser/src/api.rs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tonnage.server.engines.errors import Refused
from tonnage.server.text.grammar import Grammar

if TYPE_CHECKING:
    import llguidance  # this package is optional (extra "grammar"), so only functions import it

# Limits of one matcher; llguidance reports an error if one is exceeded. With llguidance's defaults, one mask of
# a rule with 4,000 to 8,000 optional parts took 0.8 to 1.4 s (demo model's vocabulary). With these limits the
# slowest known mask takes 0.1 s. A mask of an ordinary schema takes 0.01 to 5 ms. A schema of 1,000 optional
# properties has 10,000 grammar symbols.
LIMITS: dict[str, Any] = {
    "step_max_items": 10_000,  # llguidance's default is 50,000
    "max_grammar_size": 12_000,  # grammar symbols; llguidance's default is 500,000
    "max_lexer_states": 10_000,  # llguidance's default is 250,000; one state takes 1 to 2 KB
    "verbose_errors": False,  # verbose errors would include the parser's state
}

# Permit white space only where json.dumps puts it, because small models otherwise write blanks until
# max_tokens. As in xgrammar, a schema keyword that llguidance does not know (uniqueItems, if ...) is ignored,
# and oneOf is treated as anyOf.
_JSON: Any = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "lenient": True,
    "coerce_one_of": True,
}

# Keywords of a JSON schema whose values contain schemas. The value of a keyword in _NAMED is a dictionary of
# schemas, of one in _NESTED a schema or a list of schemas. Keywords whose schemas must all hold (allOf, not,
# if) are left out. If `closed` restricted each of these to its own properties, no value would satisfy them all.
_NAMED = ("properties", "patternProperties", "$defs", "definitions")
_NESTED = ("items", "prefixItems", "anyOf", "oneOf", "additionalProperties")


class GrammarError(Refused):
    """An error for a request whose grammar is invalid or exceeds this server's limits."""


def tokenizer_of(folder: Path, vocab_size: int) -> llguidance.LLTokenizer:
    """Return llguidance's tokenizer, made from the tokenizer.json in ``folder``.

    Args:
        folder: folder with the model's tokenizer.json.
        vocab_size: number of logits per token.

    Raises:
        ImportError: llguidance is not installed.
        Exception: any error that the content of the file causes.
    """
    import llguidance  # imported here, because the extra "grammar" is optional

    # Read the file here, because LLTokenizer would look up a missing path on the Hugging Face hub.
    text = (folder / "tokenizer.json").read_text(encoding="utf-8")
    try:
        return llguidance.LLTokenizer(text, n_vocab=vocab_size)
    # llguidance raises ValueError if the tokenizer has more tokens than the model has logits. The model never
    # generates the surplus tokens.
    except ValueError:
        return llguidance.LLTokenizer(text)


def special_tokens(tokenizer: llguidance.LLTokenizer) -> list[int]:
    """Return the ids of a tokenizer's special tokens, which represent no text."""
    return [token for token in range(tokenizer.vocab_size) if tokenizer.is_special_token(token)]


class _Bytes:
    """A tokenizer for llguidance with one token per byte value, followed by special tokens."""

    bos_token_id = None

    def __init__(self, special: list[str]) -> None:
        self.tokens = [bytes([byte]) for byte in range(256)] + [token.encode() for token in special]
        self.special_token_ids = list(range(256, len(self.tokens)))
        self.eos_token_id = 256

    def __call__(self, text: bytes) -> list[int]:
        """Return the bytes of ``text`` as token ids, one token per byte."""
        return list(text)


def byte_tokenizer(special: list[str]) -> llguidance.LLTokenizer:
    """Return a tokenizer with one token per byte value and the given special tokens.

    The trial process, which first compiles each grammar within limits, uses it instead of the model's tokenizer
    to save memory. It takes 0.1 MiB; a tokenizer with a vocabulary of 49,152 tokens takes 36 MiB.
    """
    import llguidance  # imported here, because the extra "grammar" is optional

    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Bytes(special or ["<eos>"])))


def matcher_of(tokenizer: llguidance.LLTokenizer, source: str) -> llguidance.LLMatcher:
    """Return a matcher, at its start state, for ``source``, a grammar in llguidance's syntax.

    Raises:
        GrammarError: llguidance rejects the grammar.
    """
    import llguidance  # imported here, because the extra "grammar" is optional

    limits = llguidance.LLParserLimits(**LIMITS)
    matcher = llguidance.LLMatcher(tokenizer, source, log_level=0, limits=limits)
    check(matcher)
    return matcher


def check(matcher: llguidance.LLMatcher) -> None:
    """Raise GrammarError if a grammar's matcher is in llguidance's error state."""
    if matcher.is_error():
        raise GrammarError(first_line(matcher.get_error()))


def first_line(text: str) -> str:
    """Return the first non-empty line of an error message, at most 300 characters."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0][:300] if lines else "the grammar is invalid"


def parts_of(grammar: Grammar) -> list[Grammar]:
    """Return the grammars that the trial process compiles to check ``grammar`` against the server's limits.

    For a structural tag, these are the JSON schemas of its functions. Otherwise it is ``grammar`` itself.

    Raises:
        GrammarError: a schema is invalid.
        Exception: the text of a structural tag is malformed; the error may have any type.
    """
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
                # llguidance cannot compile the schema ``true`` (any value), which means the same as {}
                found.append(Grammar("json_schema", json.dumps({} if schema is True else schema)))
            level += [value for key, value in node.items() if key != "json_schema"]
    return found


def source_of(grammar: Grammar) -> str:
    """Return a request's grammar converted to llguidance's syntax.

    Raises:
        ValueError: the grammar is invalid; the converters may raise other errors, too.
    """
    # Imported here, because the extra "grammar" is optional.
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
    """Return the JSON schema ``schema`` with each object restricted to the properties that it names.

    OpenAI's strict mode requires this meaning, and xgrammar assumes it.

    Raises:
        RecursionError: the schema is nested too deeply.
    """
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
