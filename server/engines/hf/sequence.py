"""A sequence of a request in the Hugging Face engine, with its tokens, random stream and grammar matcher."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tonnage.cache import scheduler
from tonnage.cache.prefix.content import ContentKeys
from tonnage.server.engines.chunk import TokenLogprobs
from tonnage.server.engines.hf.sampling.adjust import Matcher
from tonnage.server.engines.request import GenerationRequest, SamplingParams


@dataclass(slots=True, eq=False, kw_only=True)
class HFSequence(scheduler.Sequence):
    """One of the n sequences of a request; ``tokens`` is the prompt followed by the output so far."""

    request: GenerationRequest
    tokens: list[int]
    random: np.random.Generator
    queued: float | None = None  # seconds from arrival to admission
    matcher: Matcher | None = None  # matcher of the request's grammar
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=lambda: [None])
    keys: ContentKeys | None = None  # blocks' keys in the KV tier; None without a tier or if none may be shared
    kept: int = 0  # number of leading blocks that were offered to the KV tier
    # Largest number of leading blocks offered to the KV tier so far. A preemption resets `kept`, but not this.
    offered: int = 0
    hit: int = 0  # number of blocks of the sequence's prefix hit in the pool at admission
    asked: npt.NDArray[np.int32] | None = None  # ``tokens`` as an array, cached while the sequence waits

    def token_ids(self) -> npt.NDArray[np.int32]:
        """Return the token ids of prompt and output as an int32 array, cached while the sequence waits."""
        if self.asked is None:
            self.asked = np.array(self.tokens, np.int32)
        return self.asked

    @property
    def salt(self) -> str | bytes:
        """The prefix cache salt, which restricts sharing of blocks to requests with an equal salt.

        It is random if prompt log probabilities are requested: the sequence then hits no cached block, and all
        its tokens are computed.
        """
        return secrets.token_bytes(16) if self.scores else self.request.cache_salt

    @property
    def params(self) -> SamplingParams:
        """The sampling parameters of the sequence's request."""
        return self.request.params

    @property
    def decodes(self) -> bool:
        """Whether the sequence is decoding: every token except the one drawn last has been computed."""
        return self.generated > 0 and self.length - self.computed == 1

    @property
    def logits_at(self) -> range:
        """Token positions of the sequence whose logits the current step must compute."""
        end = self.computed + self.chunk
        return range(self.computed if self.scores else end - int(self.samples), end)


def first_sequence(request: GenerationRequest, arrival: float, matcher: Matcher | None) -> HFSequence:
    """Return the first sequence of a new request; it represents all n sequences until forks are made."""
    return HFSequence(
        prompt=len(request.prompt_token_ids),
        max_tokens=request.params.max_tokens,
        arrival=arrival,
        forks=request.n - 1,
        tenant=request.tenant,
        priority=request.priority,
        weight=request.weight,
        scored=request.params.prompt_logprobs is not None,
        request=request,
        tokens=list(request.prompt_token_ids),
        random=generator(request.params.seed, 0),
        matcher=matcher,
    )


def forked(parent: HFSequence, index: int, matcher: Matcher | None) -> HFSequence:
    """Return sequence ``index`` of a request, forked from ``parent``, the request's first sequence."""
    return HFSequence(
        prompt=parent.prompt,
        max_tokens=parent.max_tokens,
        arrival=parent.arrival,
        tenant=parent.tenant,
        priority=parent.priority,
        weight=parent.weight,
        request=parent.request,
        tokens=list(parent.tokens),
        random=generator(parent.params.seed, index),
        index=index,
        matcher=matcher,
        keys=None if parent.keys is None else parent.keys.copy(),
        kept=parent.kept,
        offered=parent.offered,
    )


@dataclass(slots=True, eq=False)
class Draw:
    """The choice of the next token for one sequence in one step.

    Attributes:
        sequence: sequence that gets the token.
        row: row of the step's logits to draw from; a fork uses the row of its parent.
        token: the chosen token; until sampling, the likeliest token of the row.
        logprobs: log probability of the token, if requested.
    """

    sequence: HFSequence
    row: int
    token: int = -1
    logprobs: TokenLogprobs | None = None


def draws_of(picked: Iterable[HFSequence]) -> list[Draw]:
    """Return a `Draw` for each sequence that samples a token in this step; rows are in batch order."""
    return [Draw(sequence, row) for row, sequence in enumerate(s for s in picked if s.samples)]


def generator(seed: int | None, index: int) -> np.random.Generator:
    """Return the random number generator of sequence ``index`` of a request.

    With a seed, a sequence gets equal tokens regardless of the other sequences in the batch. Without a seed
    (None) the generator starts from fresh entropy.
    """
    if seed is None:
        return np.random.Generator(np.random.Philox())
    # The index is a spawn key. If it were part of the entropy, it would count as one more 32-bit word of the
    # seed: seed a + (b << 32) with index 0 would give the same tokens as seed a with index b.
    sequence = np.random.SeedSequence(seed & (2**64 - 1), spawn_key=(index,) if index else ())
    return np.random.Generator(np.random.Philox(sequence))
