"""What the scheduler keeps of requests: sequences that run, entries that wait. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from tonnage.cache.admission import AdmissionRequest
from tonnage.server.engines.base import GenerationRequest, SamplingParams, TokenLogprobs
from tonnage.server.engines.hf.sampling.adjust import Matcher


@dataclass(slots=True)
class Sequence:
    """One of the n sequences of a request. ``tokens`` is prompt plus output; ``computed`` of them have K/V."""

    id: int
    request: GenerationRequest
    index: int
    tokens: list[int]
    computed: int
    cached_tokens: int
    random: np.random.Generator
    arrived: float  # time.monotonic()
    chunk: int = 0  # tokens computed in the step under way
    queued: float | None = None  # seconds from its arrival here to admission
    matcher: Matcher | None = None  # of its grammar
    forked: bool = False  # its siblings are sequences of their own
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=lambda: [None])

    @property
    def generated(self) -> int:
        return len(self.tokens) - len(self.request.prompt_token_ids)

    @property
    def params(self) -> SamplingParams:
        return self.request.params

    @property
    def scores(self) -> bool:
        """The logits of every token of the step are wanted: the prompt's log probabilities are."""
        return self.params.prompt_logprobs is not None and self.index == 0 and not self.generated

    @property
    def decodes(self) -> bool:
        """All but the token drawn last is computed."""
        return self.generated > 0 and len(self.tokens) - self.computed == 1

    @property
    def rows(self) -> int:
        """Logits wanted of it in the step under way, one a row."""
        return self.chunk if self.scores else int(self.samples)

    @property
    def unforked(self) -> bool:
        """It still stands for all n sequences of its request."""
        return self.index == 0 and not self.generated and not self.forked

    @property
    def indices(self) -> range:
        """The sequences of the request that end when this one does."""
        return range(self.request.n) if self.unforked else range(self.index, self.index + 1)

    def includes(self, index: int | None) -> bool:
        """It can end for sequence ``index`` of its request, or for all (None)."""
        return index is None or self.indices == range(index, index + 1)

    @property
    def samples(self) -> bool:
        """The step under way reaches the last token, so a next one is drawn."""
        return self.computed + self.chunk == len(self.tokens)


def generator(seed: int | None, index: int) -> np.random.Generator:
    """The random stream of sequence ``index`` of a request, its own: the same seed draws the same tokens
    whatever else runs beside it. Without a seed, fresh entropy."""
    if seed is None:
        return np.random.Generator(np.random.Philox())
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed & (2**64 - 1), index])))


@dataclass(slots=True)
class Entry:
    """What waits: a request, or one of its sequences that was preempted (``resumed``)."""

    request: GenerationRequest
    tokens: np.ndarray  # int32, prompt and what was produced; converted once however often admission is asked
    arrived: float
    resumed: Sequence | None = None
    again: bool = False  # it was admitted once and preempted: its prompt is counted already

    @property
    def sequences(self) -> int:
        return self.request.n if self.resumed is None else 1

    @property
    def indices(self) -> range:
        """The sequences of the request that wait with it."""
        return range(self.request.n) if self.resumed is None else self.resumed.indices

    def includes(self, index: int | None) -> bool:
        """It can end for sequence ``index`` of its request, or for all (None)."""
        return index is None or self.indices == range(index, index + 1)

    @property
    def wish(self) -> AdmissionRequest:
        request, produced = self.request, self.resumed.generated if self.resumed else 0
        return AdmissionRequest(
            len(self.tokens),
            request.params.max_tokens - produced,
            self.sequences,
            request.tenant,
            request.priority,
            produced=produced,
        )
