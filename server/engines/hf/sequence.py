"""One of the n sequences of a request, with what the model and the API need of it. No torch."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tonnage.cache import scheduler
from tonnage.server.engines.chunk import TokenLogprobs
from tonnage.server.engines.hf.sampling.adjust import Matcher
from tonnage.server.engines.request import GenerationRequest, SamplingParams


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence(scheduler.Sequence):
    """``tokens`` is prompt plus output."""

    request: GenerationRequest
    tokens: list[int]
    random: np.random.Generator
    queued: float | None = None  # seconds from its arrival to admission
    matcher: Matcher | None = None  # of its grammar
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=lambda: [None])
    asked: npt.NDArray[np.int32] | None = None  # ``tokens``, while it waits

    def token_ids(self) -> npt.NDArray[np.int32]:
        """Converted once however often admission is asked."""
        if self.asked is None:
            self.asked = np.array(self.tokens, np.int32)
        return self.asked

    @property
    def salt(self) -> str | bytes:
        """A prompt whose log probabilities are wanted is computed whole: it may not hit the cache."""
        return secrets.token_bytes(16) if self.scores else self.request.cache_salt

    @property
    def params(self) -> SamplingParams:
        return self.request.params

    @property
    def decodes(self) -> bool:
        """All but the token drawn last is computed."""
        return self.generated > 0 and self.length - self.computed == 1

    @property
    def rows(self) -> int:
        """Logits wanted of it in the step under way, one a row."""
        return self.chunk if self.scores else int(self.samples)


def first_sequence(request: GenerationRequest, arrival: float, matcher: Matcher | None) -> Sequence:
    """The one that stands for all n of a request that has come in."""
    return Sequence(
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


def forked(parent: Sequence, index: int, matcher: Matcher | None) -> Sequence:
    """Sequence ``index`` of the request, with what ``parent``, its first, knows."""
    return Sequence(
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


def generator(seed: int | None, index: int) -> np.random.Generator:
    """The random stream of sequence ``index`` of a request, its own: the same seed draws the same tokens
    whatever else runs beside it. Without a seed, fresh entropy."""
    if seed is None:
        return np.random.Generator(np.random.Philox())
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed & (2**64 - 1), index])))
