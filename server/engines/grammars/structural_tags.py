"""Structural tags, compiled by xgrammar: free text with parts in a required syntax, such as tool calls.

vLLM's tool parsers produce them. llguidance does not support their many forms, and only xgrammar's own limits
bound their cost. They occur only if the operator has chosen a tool parser and a request has strict functions. A
separate thread compiles them.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tonnage.planner.errors import DeploymentError, TonnageError
from tonnage.server.engines.grammars import memory
from tonnage.server.engines.grammars.library import GrammarError, first_line


class TagCompiler:
    """A compiler of structural tags for the tokenizer in ``folder``; its first use takes some seconds.

    ``vocab_size`` is the number of logits per token.
    """

    def __init__(self, folder: Path, vocab_size: int) -> None:
        self._folder, self._vocab_size = folder, vocab_size
        self._compiler: Any = None

    def compile(self, text: str) -> CompiledTag:
        """Compile the structural tag ``text``.

        Raises:
            GrammarError: the tag is invalid.
            DeploymentError: xgrammar is not installed.
        """
        try:
            if self._compiler is None:
                self._compiler = self._load()
            return CompiledTag(self._compiler.compile_structural_tag(text), self._vocab_size)
        except TonnageError:
            raise
        except Exception as error:  # xgrammar or a damaged tokenizer file may cause any error
            said = f"{type(error).__name__}: {first_line(str(error))}"
            raise GrammarError(said, field="structural_tag") from None

    def _load(self) -> Any:
        try:
            import xgrammar  # imported here, because xgrammar is optional (extra "vllm")
        except ImportError:
            raise DeploymentError(
                "structural tags need xgrammar", field="grammar", hint="pip install 'tonnage[vllm]'"
            ) from None
        # Imported here, because the import is slow and few requests need it.
        from transformers import AutoTokenizer

        # trust_remote_code is False explicitly, because otherwise transformers asks on the terminal whether to
        # run code from the folder.
        tokenizer = AutoTokenizer.from_pretrained(self._folder, local_files_only=True, trust_remote_code=False)
        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=self._vocab_size)
        # xgrammar's cache is disabled, because the caller caches compiled tags.
        return xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)


class CompiledTag:
    """A compiled structural tag, from which a matcher is created for each output sequence."""

    def __init__(self, compiled: Any, vocab_size: int) -> None:
        self._compiled, self._vocab_size = compiled, vocab_size
        self.held: int = compiled.memory_size_bytes
        memory.count(self)

    def begin(self, ends: tuple[int, ...]) -> TagMatcher:
        """Return a matcher for one output sequence; one of the tokens ``ends`` may end its complete text."""
        return TagMatcher(self, self._compiled, ends, self._vocab_size)


class TagMatcher:
    """The state of one output sequence in its structural tag, with the methods of ``masks.GrammarMatcher``."""

    def __init__(self, tag: CompiledTag, compiled: Any, ends: tuple[int, ...], vocab_size: int) -> None:
        # Imported here, because xgrammar is optional (extra "vllm"). It is installed here: it compiled the tag.
        import xgrammar

        self.compiled = tag
        self.seconds = 0.0
        self.due = True
        self._matcher = xgrammar.GrammarMatcher(
            compiled, override_stop_tokens=list(ends) or None, terminate_without_stop_token=not ends
        )
        self._apply = xgrammar.apply_token_bitmask_inplace
        self._bitmask = xgrammar.allocate_token_bitmask(1, vocab_size)

    def fill(self) -> None:
        """Compute the mask of tokens that the structural tag permits next."""
        began = time.thread_time()
        self._matcher.fill_next_token_bitmask(self._bitmask)
        self.seconds, self.due = time.thread_time() - began, False

    def row(self) -> npt.NDArray[np.int32]:
        """Return the token mask as int32 words [vocabulary / 32], one bit per token, lowest bit first.

        A bit of 1 means that the structural tag permits the token next.
        """
        if self.due:
            self.fill()
        row: npt.NDArray[np.int32] = self._bitmask[0].numpy()
        return row

    def mask(self, logits: torch.Tensor) -> None:
        """Set the logits of tokens that the structural tag does not permit next to -inf, in place.

        ``logits`` is [vocabulary].
        """
        if self.due:
            self.fill()
        self._apply(logits[None], self._bitmask.to(logits.device))

    def accept(self, token: int) -> bool:
        """Advance by one output token; return whether the structural tag's text is complete.

        Raises:
            GrammarError: the tag does not permit the token.
        """
        self.due = True
        try:
            matches = self._matcher.accept_token(token)
        except RuntimeError as error:
            raise GrammarError(first_line(str(error)), field="structural_tag") from None
        if not matches:
            raise GrammarError(f"token {token} does not match the grammar", field="structural_tag")
        return bool(self._matcher.is_terminated())
