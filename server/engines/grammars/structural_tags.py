"""Structural tags, compiled by xgrammar: text with parts in a given form, as vLLM's tool parsers require.

llguidance does not know their many forms. Their cost is bounded by xgrammar only. They occur only if the
operator has chosen a tool parser and a request has strict functions; a thread of its own compiles them.
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
    """A compiler of structural tags for the tokenizer in ``folder``; its first use takes some seconds."""

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
        except Exception as error:  # xgrammar and a model's files may cause any error
            said = f"{type(error).__name__}: {first_line(str(error))}"
            raise GrammarError(said, field="structural_tag") from None

    def _load(self) -> Any:
        try:
            import xgrammar  # optional (extra vllm)
        except ImportError:
            raise DeploymentError(
                "structural tags need xgrammar", field="grammar", hint="pip install 'tonnage[vllm]'"
            ) from None
        from transformers import AutoTokenizer  # slow to import, and few requests need it

        # An explicit False: otherwise transformers asks on the terminal whether to run the folder's own code.
        tokenizer = AutoTokenizer.from_pretrained(self._folder, local_files_only=True, trust_remote_code=False)
        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=self._vocab_size)
        # cache_enabled=False: the caller has a cache of its own.
        return xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)


class CompiledTag:
    """A compiled structural tag, from which matchers start."""

    def __init__(self, compiled: Any, vocab_size: int) -> None:
        self._compiled, self._vocab_size = compiled, vocab_size
        self.held: int = compiled.memory_size_bytes
        memory.count(self)

    def begin(self, ends: tuple[int, ...]) -> TagMatcher:
        """Return a matcher for one answer that one of the tokens ``ends`` may end."""
        return TagMatcher(self, self._compiled, ends, self._vocab_size)


class TagMatcher:
    """The state of one answer in its structural tag, with the methods of ``masks.GrammarMatcher``."""

    def __init__(self, tag: CompiledTag, compiled: Any, ends: tuple[int, ...], vocab_size: int) -> None:
        import xgrammar  # optional (extra vllm); installed once a tag was compiled

        self.compiled = tag
        self.seconds = 0.0
        self.due = True
        self._matcher = xgrammar.GrammarMatcher(
            compiled, override_stop_tokens=list(ends) or None, terminate_without_stop_token=not ends
        )
        self._apply = xgrammar.apply_token_bitmask_inplace
        self._bitmask = xgrammar.allocate_token_bitmask(1, vocab_size)

    def fill(self) -> None:
        """Compute the mask for the next token."""
        began = time.thread_time()
        self._matcher.fill_next_token_bitmask(self._bitmask)
        self.seconds, self.due = time.thread_time() - began, False

    def row(self) -> npt.NDArray[np.int32]:
        """Return the mask as bits [vocabulary / 32], lowest bit first; 1 means that the token may follow."""
        if self.due:
            self.fill()
        row: npt.NDArray[np.int32] = self._bitmask[0].numpy()
        return row

    def mask(self, logits: torch.Tensor) -> None:
        """Set the logits of tokens that may not follow to -inf, in place; ``logits`` [vocabulary]."""
        if self.due:
            self.fill()
        self._apply(logits[None], self._bitmask.to(logits.device))

    def accept(self, token: int) -> bool:
        """Advance by one token; return whether the tag is complete.

        Raises:
            GrammarError: the token does not match.
        """
        self.due = True
        try:
            matches = self._matcher.accept_token(token)
        except RuntimeError as error:
            raise GrammarError(first_line(str(error)), field="structural_tag") from None
        if not matches:
            raise GrammarError(f"token {token} does not match", field="structural_tag")
        return bool(self._matcher.is_terminated())
