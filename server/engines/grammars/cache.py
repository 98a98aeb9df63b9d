"""A cache of grammars compiled with the model's own vocabulary, in the process that runs the model.

A grammar is compiled here only after a trial in another process has bounded its compile time and memory.
llguidance releases the GIL while it compiles.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from pathlib import Path

from tonnage.planner.errors import DeploymentError, TonnageError
from tonnage.server.engines.grammars import library
from tonnage.server.engines.grammars.library import GrammarError
from tonnage.server.engines.grammars.masks import HELD_BYTES, CompiledGrammar, GrammarMatcher
from tonnage.server.engines.grammars.memory import held_bytes
from tonnage.server.engines.grammars.structural_tags import CompiledTag, TagCompiler, TagMatcher
from tonnage.server.text.grammar import Grammar

# Upper bound of the cached grammars' memory; above it, the least recently used are evicted.
CACHE_BYTES = HELD_BYTES // 2


class GrammarCache:
    """A thread-safe cache of compiled grammars.

    ``broken`` is the error raised for every grammar if the model's tokenizer cannot be loaded, else None.

    Args:
        folder: folder with the model's tokenizer.json.
        vocab_size: number of logits per token.
    """

    def __init__(self, folder: Path, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._lock = threading.Lock()  # protects the cache `_compiled` from concurrent changes
        self._building = threading.Lock()
        self._compiled: OrderedDict[Grammar, CompiledGrammar | CompiledTag] = OrderedDict()
        self._tags = TagCompiler(folder, vocab_size)
        self.broken: TonnageError | None = None
        try:
            self._tokenizer = library.tokenizer_of(folder, vocab_size)
            self._special = frozenset(library.special_tokens(self._tokenizer))
        except ImportError:
            self.broken = DeploymentError(
                "a grammar needs llguidance", field="grammar", hint="pip install 'tonnage[grammar]'"
            )
        except Exception as error:  # a damaged tokenizer file may cause any error
            said = library.first_line(str(error))
            self.broken = GrammarError(
                f"grammars need the model's tokenizer, which does not load ({type(error).__name__}: {said})",
                field="grammar",
            )

    def __contains__(self, grammar: object) -> bool:
        return grammar in self._compiled

    def begin(
        self, grammar: Grammar, stop_token_ids: tuple[int, ...], source: str | None = None, held: int = 0
    ) -> GrammarMatcher | TagMatcher:
        """Return a new matcher for a grammar that compiled within the limits in the trial process.

        Args:
            grammar: the grammar as the client sent it.
            stop_token_ids: stop tokens of the request.
            source: the grammar in llguidance's syntax; None to convert it now.
            held: memory in bytes that compiling it took in the trial process.

        Raises:
            TonnageError: the grammar cannot be compiled now; see `compiled`.
        """
        compiled = self.compiled(grammar, source, held)
        # Only special tokens can end the text in the grammar. Other stop tokens are ordinary text to the
        # grammar; the scheduler ends the sequence when one is drawn.
        return compiled.begin(tuple(token for token in stop_token_ids if token in self._special))

    def compiled(
        self, grammar: Grammar, source: str | None = None, held: int = 0
    ) -> CompiledGrammar | CompiledTag:
        """Return the compiled grammar from the cache, or compile it.

        Args:
            grammar: the grammar as the client sent it.
            source: the grammar in llguidance's syntax; None to convert it now.
            held: memory in bytes that compiling it took in the trial process.

        Raises:
            TonnageError: the tokenizer is unusable, the grammar is invalid, or the memory for grammars is full.
        """
        if self.broken is not None:
            raise self.broken
        with self._lock:
            if (found := self._compiled.get(grammar)) is not None:
                self._compiled.move_to_end(grammar)
                return found
        made: CompiledGrammar | CompiledTag
        if grammar.kind == "structural_tag":
            made = self._tags.compile(grammar.text)
        else:
            # Compile one grammar at a time, so that a growth of the process's memory is due to one grammar.
            with self._building:
                made = self._made(grammar, source, held)
        with self._lock:
            self._compiled[grammar] = made
            while sum(each.held for each in self._compiled.values()) > CACHE_BYTES and len(self._compiled) > 1:
                self._compiled.popitem(last=False)
        return made

    def _made(self, grammar: Grammar, source: str | None, held: int) -> CompiledGrammar:
        if not self._make_room(held):
            raise TonnageError(
                f"this grammar needs {held >> 20} MiB, but other requests use {held_bytes() >> 20} of the "
                f"{HELD_BYTES >> 20} MiB for grammars",
                hint="try again later",
            )
        try:
            text = source or library.source_of(grammar)
            return CompiledGrammar(self._tokenizer, text, self._vocab_size, held)
        # Report every error as an error of this grammar, because the process also serves other grammars.
        except Exception as error:
            raise GrammarError(library.first_line(str(error)), field=grammar.kind) from None

    def _make_room(self, wanted: int) -> bool:
        """Evict compiled grammars until ``wanted`` bytes of the memory for grammars are free.

        Returns whether so many bytes are free now.
        """
        with self._lock:
            while held_bytes() + wanted > HELD_BYTES and self._compiled:
                self._compiled.popitem(last=False)
        return held_bytes() + wanted <= HELD_BYTES
