"""Grammars of answers by xgrammar: JSON schemas, regular expressions, choices, EBNF and Lark.

Compiled in the engine process, on first use of the tokenizer; compiled grammars are kept.
"""

from __future__ import annotations

import functools
import json
import re
from typing import Any

import torch

from tonnage.planner.errors import DeploymentError
from tonnage.server.engines.errors import Refused
from tonnage.server.text.grammar import Grammar

_KEPT_BYTES = 64 << 20  # of compiled grammars; beyond it the least recently used go


class GrammarError(Refused):
    """The grammar of a request is not understood."""


class Grammars:
    """Makes matchers for the tokenizer of the model in ``path``."""

    def __init__(self, path: str, vocab_size: int) -> None:
        self._path, self._vocab_size = path, vocab_size
        self._textless: frozenset[int] = frozenset()  # known with the compiler

    @functools.cached_property
    def _compiler(self) -> Any:
        try:
            import xgrammar
        except ImportError:
            raise DeploymentError(
                "a grammar needs xgrammar", field="grammar", hint="pip install 'tonnage[grammar]'"
            ) from None
        from transformers import AutoTokenizer  # only where somebody asks for a grammar

        tokenizer = AutoTokenizer.from_pretrained(self._path, local_files_only=True)
        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=self._vocab_size)
        # Only what stands for no text can end a text: EOS and the other special tokens.
        self._textless = frozenset((*info.stop_token_ids, *info.special_token_ids))
        return xgrammar.GrammarCompiler(info, max_threads=1, cache_limit_bytes=_KEPT_BYTES)

    def matcher(self, grammar: Grammar, stop_token_ids: tuple[int, ...]) -> GrammarMatcher:
        """A matcher at the start of an answer. Raises GrammarError, or DeploymentError without xgrammar."""
        compiler = self._compiler
        # Another stop token of the request is one of the grammar's own; it ends the answer where it is drawn.
        ends = tuple(token for token in stop_token_ids if token in self._textless)
        try:
            return GrammarMatcher(_compile(compiler, grammar), ends, self._vocab_size)
        except (RuntimeError, ValueError, TypeError) as error:  # what xgrammar raises on a bad grammar
            message = str(error).strip().splitlines()
            raise GrammarError(message[-1][:300] if message else "not understood", field=grammar.kind) from None


def _compile(compiler: Any, grammar: Grammar) -> Any:
    if grammar.kind in ("json_object", "json_schema"):
        # White space only where json.dumps puts it: small models else write blanks until max_tokens.
        return compiler.compile_json_schema(grammar.text or '{"type": "object"}', any_whitespace=False)
    if grammar.kind == "regex":
        return compiler.compile_regex(grammar.text)
    if grammar.kind == "choice":
        return compiler.compile_regex("|".join(f"({re.escape(choice)})" for choice in json.loads(grammar.text)))
    if grammar.kind == "structural_tag":
        return compiler.compile_structural_tag(grammar.text)
    if "::=" in grammar.text:
        return compiler.compile_grammar(grammar.text)
    return compiler.compile_lark(grammar.text)


class GrammarMatcher:
    """One answer's way through a grammar. After a complete text a stop token may follow; without any, the text
    ends when it is complete."""

    def __init__(self, compiled: Any, stop_token_ids: tuple[int, ...], vocab_size: int) -> None:
        import xgrammar  # of the extra grammar

        stops = list(stop_token_ids)
        self._matcher = xgrammar.GrammarMatcher(
            compiled, override_stop_tokens=stops or None, terminate_without_stop_token=not stops
        )
        self._apply = xgrammar.apply_token_bitmask_inplace
        self._bitmask = xgrammar.allocate_token_bitmask(1, vocab_size)

    def mask(self, logits: torch.Tensor) -> None:
        self._matcher.fill_next_token_bitmask(self._bitmask)
        self._apply(logits[None], self._bitmask.to(logits.device))

    def accept(self, token: int) -> bool:
        if not self._matcher.accept_token(token):
            raise GrammarError(f"token {token} does not match", field="grammar")
        return bool(self._matcher.is_terminated())
