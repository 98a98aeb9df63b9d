"""The Engine protocol: what the API may ask of HF, vLLM and the fake, and the values that cross the border.

The API process owns text (tokenizing, detokenizing, stop strings); engines see token ids only.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Literal, Protocol

from tonnage.cache.admission import Limits
from tonnage.planner.errors import DeploymentError, TonnageError
from tonnage.planner.plan import Plan

FinishReason = Literal["stop", "length", "abort", "error"]


class EngineDead(TonnageError):
    """The engine process is gone; in-flight requests end with this."""

    code = "engine_dead"


class NeverFits(TonnageError):
    """The request can never fit (admission said Never); the message carries the numbers."""

    code = "exceeds_kv_capacity"


class QueueFull(TonnageError):
    """The request would fit, but not now. ``retry_after_seconds`` from the drain estimate."""

    code = "server_overloaded"
    retry_after_seconds: float = 1.0


@dataclass(frozen=True, slots=True)
class Grammar:
    """What the text of an answer must match: ``json_schema`` and ``json_object`` (then ``text`` is empty or
    a JSON schema), ``regex``, ``choice`` (a JSON array of strings), ``lark``/EBNF as ``grammar``, or
    ``structural_tag``: xgrammar's JSON for text with parts in a given form (tool calls)."""

    kind: Literal["json_schema", "json_object", "regex", "choice", "grammar", "structural_tag"]
    text: str = ""


@dataclass(frozen=True, slots=True)
class Pooling:
    """Asks for the embedding of the prompt. ``dimensions``: the first so many, normalized again, of a model
    that was trained for it."""

    dimensions: int | None = None


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Field meanings as in vLLM's SamplingParams. temperature 0 = greedy; top_k 0 = off.

    ``logprobs``: with each token its own log probability and those of this many best ones (before temperature
    and truncation, vLLM's ``raw_logprobs``); ``prompt_logprobs`` the same for the prompt, None: none.
    ``logit_bias``: (token id, added to its logit). ``min_tokens``: no stop token before so many tokens.
    ``pooling``: a vector instead of tokens, by an engine that ``embeds``.
    What an engine does not honour (:attr:`Engine.honours`) is refused before it gets there.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()  # the model's EOS ids included, unless ignore_eos
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    grammar: Grammar | None = None
    pooling: Pooling | None = None


# The sampling parameters every engine honours; what an engine honours beyond them is in its ``honours``.
BASIC_PARAMS = frozenset({"max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop_token_ids"})


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """``n`` sequences from one prompt; ``request_id`` unique among the live ones. ``lora``: name of the
    adapter, empty for the model itself."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    n: int = 1
    tenant: str = ""
    cache_salt: str = ""
    priority: int = 0
    lora: str = ""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probability (natural) of a token, and of the best ones at its place as (token id, logprob), best
    first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)  # one for each token: frozen it costs five times as much (object.__setattr__ a field)
class Chunk:
    """New tokens of one of the n sequences, not to be changed. A stop token that ended it is not among them.

    ``logprobs``: one for each of ``token_ids``, when they were asked for. ``prompt_logprobs``: in the first
    chunk, one for each prompt token, the first (which nothing forecasts) None.
    """

    request_id: str
    index: int
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0  # prompt tokens served from the prefix cache
    error: str | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    embedding: tuple[float, ...] = ()  # of the prompt, in the one chunk of a request for it
    queued_seconds: float | None = None  # from submit to admission; None: this engine does not say


@dataclass(frozen=True, slots=True)
class PoolStats:
    """Blocks by state: used + cached + free = usable. ``reserved`` >= used counts what admission reserved.

    ``committed``: the peak of the reserved schedule, where admission looks at more than the sum of reservations
    (None: it does not). ``evictions_by_cause``: in the order of
    `tonnage.cache.blocks.state.EVICTION_CAUSES`; empty where the engine does not say. ``tail_waste_slots``:
    slots of used blocks that hold no token, a block that several sequences share counted for each (None: this
    engine does not say).
    """

    num_blocks: int
    usable: int
    used: int
    cached: int
    free: int
    reserved: int
    evictions: int = 0
    evictions_by_cause: tuple[int, ...] = ()
    committed: int | None = None
    tail_waste_slots: int | None = None


@dataclass(frozen=True, slots=True)
class MeasuredMemory:
    """Bytes the server really holds. None: not measured by this engine.

    ``weights`` sums the storages of modules, buffers and quantization state after load; ``kv_pool`` the
    storages of the pool; ``framework`` what the processes held at ready beside these two; ``process`` the
    RssAnon + RssShmem of all processes now, ``process_peak`` its maximum. ``warm_weights``: the weights
    once more after the first full step, in which a kernel may repack what it uses.
    """

    weights: int | None = None
    kv_pool: int | None = None
    framework: int | None = None
    process: int | None = None
    process_peak: int | None = None
    warm_weights: int | None = None

    @property
    def activations(self) -> int | None:
        """What the peak holds beyond weights, pool and framework."""
        parts = (self.process_peak, self.weights, self.kv_pool, self.framework)
        if any(part is None for part in parts):
            return None
        peak, weights, kv_pool, framework = (part or 0 for part in parts)
        return max(0, peak - weights - kv_pool - framework)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot; reading it never waits for the engine."""

    ready: bool
    running: int
    waiting: int
    pool: PoolStats
    memory: MeasuredMemory = field(default_factory=MeasuredMemory)
    admissions: tuple[tuple[str, str, int], ...] = ()  # (outcome admit|wait|never, reason, count)
    refused_blocks: tuple[tuple[str, str, int], ...] = ()  # (wait|never, reason, blocks that were missing)
    preemptions: int = 0
    preempted_tokens: int = 0  # computed tokens that preemptions threw away
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_hit_tokens: int = 0
    shared_hit_tokens: int = 0  # the part of them from blocks that requests with any salt, or none, may read
    restarts: int = 0
    invariant_violations: int = 0


@dataclass(frozen=True, slots=True)
class Capacity:
    """What the engine really has after load, to hold against the Plan."""

    num_blocks: int
    block_size: int
    max_model_len: int
    plan: Plan  # revision 1


def limits_of(plan: Plan) -> Limits:
    """What admission may reserve from: the Plan's pool and lengths. Raises DeploymentError on an open value."""
    deployment = plan.deployment
    values = {
        "max_model_len": deployment.max_model_len,
        "max_num_seqs": deployment.max_num_seqs,
        "max_num_batched_tokens": deployment.max_num_batched_tokens,
    }
    for name, value in values.items():
        if value is None:
            raise DeploymentError("the plan leaves it open", field=name, hint="build it with make_plan")
    return Limits(
        layout=plan.kv_cache.layout,
        usable_blocks=plan.kv_cache.usable_blocks,
        **{name: value or 0 for name, value in values.items()},
    )


class Engine(Protocol):
    """One running model. All methods are called from the API process's event loop."""

    @property
    def plan(self) -> Plan:
        """The plan printed before the load (revision 0)."""
        ...

    @property
    def honours(self) -> frozenset[str]:
        """Names of the fields of SamplingParams it acts on: BASIC_PARAMS and more."""
        ...

    async def start(self) -> None:
        """Load; returns when it can serve. Raises TonnageError with what to do."""
        ...

    def generate(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
        """Submit. Raises NeverFits / QueueFull / EngineDead before the first chunk.

        Ends after each of the n sequences sent a finish_reason. Closing the iterator aborts the request
        and frees its blocks within one step.
        """
        ...

    async def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request, or one of its n sequences where the engine can: its last chunk says ``abort``."""
        ...

    def stats(self) -> EngineStats: ...

    def capacity(self) -> Capacity: ...

    async def drain(self, seconds: float) -> None:
        """Admit no more; return when the running requests ended or the time is up."""
        ...

    async def stop(self) -> None: ...
