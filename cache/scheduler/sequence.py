"""The scheduler's records: sequences, steps, the decisions of a step, and counters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from tonnage.cache.admission.types import AdmissionRequest, Never
from tonnage.cache.results import BlockCopy
from tonnage.cache.sequences.tables import TokenIds


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence(ABC):
    """A waiting or running sequence; an engine's subclass adds its own fields.

    ``length`` tokens are known, prompt and output, and K/V of ``computed`` of them is written. A step computes
    tokens between ``computed`` and ``length``. This rule covers decode, chunked prefill and the rest of a
    prompt after a prefix hit. ``index`` is the sequence's number among the n of its request. Index 0 stands for
    all of them until the ``forks`` others are forked from it, once the prompt is computed.
    """

    prompt: int  # number of prompt tokens
    max_tokens: int
    arrival: float  # arrival time in seconds, from any origin
    forks: int = 0
    index: int = 0
    tenant: str = ""
    priority: int = 0
    weight: float = 1.0  # weight of the tenant's API key when several keys share the engine
    scored: bool = False  # whether the logits of every prompt token are requested
    id: int = -1  # id in order of arrival, assigned by the scheduler
    length: int = 0
    computed: int = 0
    chunk: int = 0  # tokens computed in the current step
    cached: int = 0  # prompt tokens served from the prefix cache
    junction: int = 0  # length of a prefix cached without a recurrent state at its end; 0: none
    preempted: bool = False  # whether the sequence was preempted at least once
    waited: bool = False  # whether admission has deferred the request since it was queued

    def __post_init__(self) -> None:
        self.length = self.length or self.prompt

    @abstractmethod
    def token_ids(self) -> TokenIds:
        """Return the ``length`` known tokens (prompt and output) for the block manager."""

    @property
    def salt(self) -> str | bytes:
        """Cache salt of the sequence; sequences with different salts share only allowed prefixes."""
        return ""

    @property
    def generated(self) -> int:
        """Number of output tokens that the sequence has so far."""
        return self.length - self.prompt

    @property
    def scores(self) -> bool:
        """Whether the sequence needs the logits of each of its tokens in the step, not only of the last."""
        return self.scored and self.length == self.prompt

    @property
    def samples(self) -> bool:
        """Whether the current step computes the last known token, so that the next token is sampled."""
        return self.computed + self.chunk >= self.length

    @property
    def indices(self) -> range:
        """Indices, in 0 to n - 1, of the request's sequences that end when this sequence ends."""
        return range(self.index, self.index + 1 + self.forks)

    def includes(self, index: int | None) -> bool:
        """Return whether this is sequence ``index`` of its request and has no forks to start; None fits all."""
        return index is None or self.indices == range(index, index + 1)

    @property
    def wish(self) -> AdmissionRequest:
        """The sequence's lengths, tenant and priority as admission reads them.

        After a preemption the output so far counts as prompt, because it is computed again.
        """
        produced = self.length - self.prompt
        return AdmissionRequest(
            self.length,
            self.max_tokens - produced,
            1 + self.forks,
            self.tenant,
            self.priority,
            produced=produced,
            weight=self.weight,
        )


S = TypeVar("S", bound=Sequence)


@dataclass(frozen=True, slots=True)
class Decisions:
    """The scheduler's decisions in one step, as sequence ids.

    The replay, the fake engine and the HF engine must take the same decisions.
    """

    chunks: tuple[tuple[int, int], ...]  # (sequence id, tokens) in the order of the batch
    admitted: tuple[int, ...]
    preempted: tuple[int, ...]
    refused: tuple[int, ...]


@dataclass(slots=True)
class Step(Generic[S]):
    """The scheduler's decisions for one engine step.

    Attributes:
        picked: Sequences that compute their ``chunk`` tokens in this step, in batch order, after ``copies``.
        drawing: The ``picked`` sequences that sample a token.
        copies: Block copies to perform first.
        admitted: Requests that started in this step.
        preempted: Sequences that lost their blocks and wait again.
        refused: Requests that can never fit, with the reason.
        stalled: Sequences that requested blocks and were granted none.
        turns: Number of decode steps taken at once.
    """

    picked: list[S] = field(default_factory=list)
    drawing: list[S] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    admitted: list[S] = field(default_factory=list)
    preempted: list[S] = field(default_factory=list)
    refused: list[tuple[S, Never]] = field(default_factory=list)
    stalled: list[S] = field(default_factory=list)
    turns: int = 1

    def decisions(self) -> Decisions:
        """Return the step's decisions as sequence ids; call it before `Scheduler.computed`."""
        return Decisions(
            tuple((s.id, s.chunk) for s in self.picked),
            tuple(s.id for s in self.admitted),
            tuple(s.id for s in self.preempted),
            tuple(s.id for s, _ in self.refused),
        )


@dataclass(slots=True)
class Counters:
    """Counters of the scheduler since its start: tokens, preemptions and decisions of admission.

    ``admissions`` and ``missing_blocks`` are keyed by (admit | wait | never, reason).
    """

    prompt_tokens: int = 0
    prefix_hit_tokens: int = 0
    shared_hit_tokens: int = 0
    preemptions: int = 0
    preempted_tokens: int = 0  # tokens that must be computed again after a preemption
    admissions: dict[tuple[str, str], int] = field(default_factory=dict)
    missing_blocks: dict[tuple[str, str], int] = field(default_factory=dict)

    def count(self, outcome: str, reason: str, missing: int = 0) -> None:
        """Count one decision of admission; the caller counts a waiting request once, not in every step."""
        key = (outcome, str(reason))
        self.admissions[key] = self.admissions.get(key, 0) + 1
        if missing > 0:
            self.missing_blocks[key] = self.missing_blocks.get(key, 0) + missing
