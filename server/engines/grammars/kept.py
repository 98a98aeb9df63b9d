"""What has passed its trial, compiled with the model's own vocabulary, where the model is.

llguidance lets other threads run meanwhile, and the trial has shown how long it may take.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from pathlib import Path

from tonnage.planner.errors import DeploymentError, TonnageError
from tonnage.server.engines.grammars import library
from tonnage.server.engines.grammars.library import GrammarError
from tonnage.server.engines.grammars.masks import HELD_BYTES, Compiled, GrammarMatcher
from tonnage.server.engines.grammars.memory import held_bytes
from tonnage.server.engines.grammars.tags import CompiledTag, TagMatcher, Tags
from tonnage.server.text.grammar import Grammar

KEPT_BYTES = HELD_BYTES // 2  # of compiled grammars; the least recently used go


class Kept:
    """``folder`` has the model's tokenizer.json; ``vocab_size``: how many logits there are. For any thread.

    ``broken``: why there are no grammars with this model, if so.
    """

    def __init__(self, folder: Path, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._lock = threading.Lock()  # of what is kept
        self._building = threading.Lock()
        self._compiled: OrderedDict[Grammar, Compiled | CompiledTag] = OrderedDict()
        self._tags = Tags(folder, vocab_size)
        self.broken: TonnageError | None = None
        try:
            self._tokenizer = library.tokenizer_of(folder, vocab_size)
            self._special = frozenset(library.special_tokens(self._tokenizer))
        except ImportError:
            self.broken = DeploymentError(
                "a grammar needs llguidance", field="grammar", hint="pip install 'tonnage[grammar]'"
            )
        except Exception as error:  # whatever the files of a model lead to
            said = library.first_line(str(error))
            self.broken = GrammarError(
                f"this model's tokenizer does not load ({type(error).__name__}: {said}), which a grammar needs",
                field="grammar",
            )

    def __contains__(self, grammar: object) -> bool:
        return grammar in self._compiled

    def begin(
        self, grammar: Grammar, stop_token_ids: tuple[int, ...], source: str | None = None, held: int = 0
    ) -> GrammarMatcher | TagMatcher:
        """The start of an answer, for a grammar that has passed its trial. Raises TonnageError."""
        compiled = self.compiled(grammar, source, held)
        # Another stop token of the request is one of the grammar's own; it ends the answer where it is drawn.
        return compiled.begin(tuple(token for token in stop_token_ids if token in self._special))

    def compiled(self, grammar: Grammar, source: str | None = None, held: int = 0) -> Compiled | CompiledTag:
        """Kept, or made now of ``source`` (None: of the grammar), which took ``held`` bytes in its trial.
        Raises TonnageError."""
        if self.broken is not None:
            raise self.broken
        with self._lock:
            if (found := self._compiled.get(grammar)) is not None:
                self._compiled.move_to_end(grammar)
                return found
        made: Compiled | CompiledTag
        if grammar.kind == "structural_tag":
            made = self._tags.compile(grammar.text)
        else:
            with self._building:  # what the process grows by is one grammar's
                made = self._made(grammar, source, held)
        with self._lock:
            self._compiled[grammar] = made
            while sum(each.held for each in self._compiled.values()) > KEPT_BYTES and len(self._compiled) > 1:
                self._compiled.popitem(last=False)
        return made

    def _made(self, grammar: Grammar, source: str | None, held: int) -> Compiled:
        if not self._make_room(held):
            raise TonnageError(
                f"the grammars of others take {held_bytes() >> 20} of the {HELD_BYTES >> 20} MiB of this "
                f"server's grammars, and yours {held >> 20} MiB",
                hint="try again",
            )
        try:
            text = source or library.source_of(grammar)
            return Compiled(self._tokenizer, text, self._vocab_size, held)
        except Exception as error:  # whoever calls serves everybody's grammars
            raise GrammarError(library.first_line(str(error)), field=grammar.kind) from None

    def _make_room(self, wanted: int) -> bool:
        """Let go of what is only kept, until ``wanted`` bytes fit beside what is matched."""
        with self._lock:
            while held_bytes() + wanted > HELD_BYTES and self._compiled:
                self._compiled.popitem(last=False)
        return held_bytes() + wanted <= HELD_BYTES
