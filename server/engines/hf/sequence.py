"""A sequence of a request in the Hugging Face engine, with its tokens, random stream and matcher."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tonnage.cache import scheduler
from tonnage.server.engines.chunk import TokenLogprobs
from tonnage.server.engines.hf.sampling.adjust import Matcher
from tonnage.server.engines.request import GenerationRequest, SamplingParams


@dataclass(slots=True, eq=False, kw_only=True)
class HFSequence(scheduler.Sequence):
    """One of the n sequences of a request. ``tokens`` is the prompt followed by the output."""

    request: GenerationRequest
    tokens: list[int]
    random: np.random.Generator
    queued: float | None = None  # seconds from arrival to admission
    matcher: Matcher | None = None  # of the request's grammar
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=lambda: [None])
    asked: npt.NDArray[np.int32] | None = None  # ``tokens`` as an array, cached while the sequence waits

    def token_ids(self) -> npt.NDArray[np.int32]:
        """Return ``tokens`` as an array, converted once while the sequence waits for admission."""
        if self.asked is None:
            self.asked = np.array(self.tokens, np.int32)
        return self.asked

    @property
    def salt(self) -> str | bytes:
        """The prefix cache salt; random if prompt log probabilities are requested, to compute all tokens."""
        return secrets.token_bytes(16) if self.scores else self.request.cache_salt

    @property
    def params(self) -> SamplingParams:
        """The sampling parameters of the request."""
        return self.request.params

    @property
    def decodes(self) -> bool:
        """Whether all tokens but the last drawn one are computed."""
        return self.generated > 0 and self.length - self.computed == 1

    @property
    def rows(self) -> int:
        """Number of rows of logits that the sequence needs in the current step."""
        return self.chunk if self.scores else int(self.samples)


def first_sequence(request: GenerationRequest, arrival: float, matcher: Matcher | None) -> HFSequence:
    """Return the first sequence of a new request, which stands for all n until they fork."""
    return HFSequence(
        prompt=len(request.prompt_token_ids),
        max_tokens=request.params.max_tokens,
        arrival=arrival,
        forks=request.n - 1,
        tenant=request.tenant,
        priority=request.priority,
        scored=request.params.prompt_logprobs is not None,
        request=request,
        tokens=list(request.prompt_token_ids),
        random=generator(request.params.seed, 0),
        matcher=matcher,
    )


def forked(parent: HFSequence, index: int, matcher: Matcher | None) -> HFSequence:
    """Return sequence ``index`` of the request, forked from ``parent``, its first sequence."""
    return HFSequence(
        prompt=parent.prompt,
        max_tokens=parent.max_tokens,
        arrival=parent.arrival,
        tenant=parent.tenant,
        priority=parent.priority,
        request=parent.request,
        tokens=list(parent.tokens),
        random=generator(parent.params.seed, index),
        index=index,
        matcher=matcher,
    )


@dataclass(slots=True, eq=False)
class Draw:
    """The next token of one sequence in one step.

    Attributes:
        sequence: the sequence that draws.
        row: row of the step's logits to draw from; a fork has its parent's row.
        token: the token, first the likeliest of the row.
        logprobs: its log probability, if the request asked for it.
    """

    sequence: HFSequence
    row: int
    token: int = -1
    logprobs: TokenLogprobs | None = None


def draws_of(picked: Iterable[HFSequence]) -> list[Draw]:
    """Return a draw for each sequence that this step computes to its last token, with rows in order."""
    return [Draw(sequence, row) for row, sequence in enumerate(s for s in picked if s.samples)]


def generator(seed: int | None, index: int) -> np.random.Generator:
    """Return the random stream of sequence ``index`` of a request.

    A seed gives the same tokens regardless of the other sequences in the batch. Without a seed the stream
    starts from fresh entropy.
    """
    if seed is None:
        return np.random.Generator(np.random.Philox())
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed & (2**64 - 1), index])))
