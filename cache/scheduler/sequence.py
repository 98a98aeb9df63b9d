"""What the scheduler knows of a sequence, and what it decides in one step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from tonnage.cache.admission import AdmissionRequest, Never
from tonnage.cache.results import BlockCopy
from tonnage.cache.sequences.tables import TokenIds


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence(ABC):
    """One sequence that waits or runs; an engine adds its own fields in a subclass.

    ``length`` tokens are known, prompt and output; K/V of ``computed`` of them is written. A step catches
    computed up with length: decode, chunked prefill and the rest of a prompt after a prefix hit are all that
    one rule. ``index`` is its number among the n of its request; 0 stands for all of them until the ``forks``
    others are forked from it, once the prompt is computed.
    """

    prompt: int  # tokens
    max_tokens: int
    arrival: float  # seconds, from any origin
    forks: int = 0
    index: int = 0
    tenant: str = ""
    priority: int = 0
    scored: bool = False  # the logits of every token of the prompt are wanted
    id: int = -1  # in order of arrival, given by the scheduler
    length: int = 0
    computed: int = 0
    chunk: int = 0  # tokens computed in the step under way
    cached: int = 0  # of the prompt, served from the prefix cache
    junction: int = 0  # up to where another prompt was the same and left no recurrent state; 0: nowhere
    preempted: bool = False  # at least once
    waited: bool = False  # since it was queued admission has said once: not now

    def __post_init__(self) -> None:
        self.length = self.length or self.prompt

    @abstractmethod
    def token_ids(self) -> TokenIds:
        """The ``length`` known tokens, for the block manager."""

    @property
    def salt(self) -> str | bytes:
        """Sequences with different salts share no block."""
        return ""

    @property
    def generated(self) -> int:
        """Tokens of its answer so far."""
        return self.length - self.prompt

    @property
    def scores(self) -> bool:
        """The logits of every token of the step are wanted, not only the last."""
        return self.scored and self.length == self.prompt

    @property
    def samples(self) -> bool:
        """The step under way reaches the last known token, so a next one is drawn."""
        return self.computed + self.chunk >= self.length

    @property
    def indices(self) -> range:
        """The sequences of the request that end when this one does."""
        return range(self.index, self.index + 1 + self.forks)

    def includes(self, index: int | None) -> bool:
        """It can end for sequence ``index`` of its request, or for all (None)."""
        return index is None or self.indices == range(index, index + 1)

    @property
    def wish(self) -> AdmissionRequest:
        """What admission is asked: a preempted sequence computes its own output again."""
        produced = self.length - self.prompt
        return AdmissionRequest(
            self.length,
            self.max_tokens - produced,
            1 + self.forks,
            self.tenant,
            self.priority,
            produced=produced,
        )


S = TypeVar("S", bound=Sequence)


@dataclass(frozen=True, slots=True)
class Decisions:
    """A step as ids: what replay, the fake engine and the HF engine have to agree on."""

    chunks: tuple[tuple[int, int], ...]  # (sequence, tokens), in the order of the batch
    admitted: tuple[int, ...]
    preempted: tuple[int, ...]
    refused: tuple[int, ...]


@dataclass(slots=True)
class Step(Generic[S]):
    """``picked`` compute their ``chunk`` tokens, in this order, after ``copies``; ``drawing`` of them draw.

    ``turns``: decode steps taken at once. ``stalled`` asked for blocks and got none. ``rows``: logits wanted.
    """

    picked: list[S] = field(default_factory=list)
    drawing: list[S] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    admitted: list[S] = field(default_factory=list)
    preempted: list[S] = field(default_factory=list)
    refused: list[tuple[S, Never]] = field(default_factory=list)
    stalled: list[S] = field(default_factory=list)
    rows: int = 0
    turns: int = 1

    def decisions(self) -> Decisions:
        """Before `Scheduler.computed`."""
        return Decisions(
            tuple((s.id, s.chunk) for s in self.picked),
            tuple(s.id for s in self.admitted),
            tuple(s.id for s in self.preempted),
            tuple(s.id for s, _ in self.refused),
        )


@dataclass(slots=True)
class Counters:
    """Since the start. Keys of ``admissions`` and ``missing_blocks``: (admit | wait | never, reason)."""

    prompt_tokens: int = 0
    prefix_hit_tokens: int = 0
    shared_hit_tokens: int = 0
    preemptions: int = 0
    preempted_tokens: int = 0  # computed, and to be computed again
    admissions: dict[tuple[str, str], int] = field(default_factory=dict)
    missing_blocks: dict[tuple[str, str], int] = field(default_factory=dict)

    def count(self, outcome: str, reason: str, missing: int = 0) -> None:
        """One answer of admission; a request that waits is counted once."""
        key = (outcome, str(reason))
        self.admissions[key] = self.admissions.get(key, 0) + 1
        if missing > 0:
            self.missing_blocks[key] = self.missing_blocks.get(key, 0) + missing
