"""vLLM's scheduler without a model: the real object in a hand-made pool, driven by made-up model outputs."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    LoRAConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from tonnage.server.demo.model import ensure_demo

BLOCK = 16
EOS = 50_256


def full(block_size: int = BLOCK) -> KVCacheSpec:
    return FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=8, dtype=torch.float32)


def sliding(window: int, block_size: int = BLOCK) -> KVCacheSpec:
    return SlidingWindowSpec(
        block_size=block_size, num_kv_heads=1, head_size=8, dtype=torch.float32, sliding_window=window
    )


@cache
def _model(length: int) -> ModelConfig:
    return ModelConfig(
        model=str(ensure_demo()), dtype="bfloat16", seed=0, max_model_len=length, skip_tokenizer_init=True
    )


@cache
def _speculation(drafts: int, length: int) -> SpeculativeConfig:
    return SpeculativeConfig(
        method="ngram", num_speculative_tokens=drafts, target_model_config=_model(length),
        target_parallel_config=ParallelConfig(),
    )  # fmt: skip


@cache
def hasher(block_size: int) -> Callable[[Request], list[Any]]:
    """Return vLLM's function from a request to its block hashes."""
    init_none_hash(sha256)
    return get_request_block_hasher(block_size, sha256)


def config(
    blocks: int,
    *,
    mode: str | None = None,
    length: int = 2048,
    sequences: int = 64,
    batched: int = 512,
    caching: bool = True,
    asynchronous: bool = True,
    policy: str = "fcfs",
    loras: int = 0,
    block_size: int = BLOCK,
    drafts: int = 0,
    **tonnage: Any,
) -> VllmConfig:
    """Return a configuration without a device. ``drafts``: most draft tokens of a step."""
    keys = tonnage if mode is None else {"admission_mode": mode, **tonnage}
    made = VllmConfig(
        model_config=_model(length),
        cache_config=CacheConfig(block_size=block_size, enable_prefix_caching=caching),
        scheduler_config=SchedulerConfig(
            max_num_seqs=sequences, max_num_batched_tokens=batched, max_model_len=length,
            enable_chunked_prefill=True, async_scheduling=asynchronous, is_encoder_decoder=False, policy=policy,
        ),
        device_config=DeviceConfig("cpu"),
        lora_config=LoRAConfig(max_loras=loras) if loras else None,
        additional_config={"tonnage": keys} if keys else {},
    )  # fmt: skip
    made.cache_config.num_gpu_blocks = blocks
    made.cache_config.block_size = block_size  # which vLLM may change on a CPU
    made.scheduler_config.async_scheduling = asynchronous  # which vLLM switches off on a CPU
    if drafts:
        made.speculative_config = _speculation(drafts, length)  # which vLLM refuses with async scheduling
    return made


def scheduler(cls: type[Any], made: VllmConfig, specs: Sequence[KVCacheSpec] | None = None) -> Any:
    size = made.cache_config.block_size
    specs = specs or [full(size)]
    groups = [KVCacheGroupSpec([f"layer.{at}"], spec) for at, spec in enumerate(specs)]
    blocks = made.cache_config.num_gpu_blocks
    assert blocks is not None
    return cls(
        vllm_config=made,
        kv_cache_config=KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups),
        structured_output_manager=StructuredOutputManager(made),
        block_size=size,
        hash_block_size=size,
        log_stats=True,
    )


def request(
    name: str, prompt: Sequence[int] | int, max_tokens: int, *, priority: int = 0, arrival: float = 0.0,
    stop: list[str] | None = None, adapter: int = 0, regex: str | None = None,
    salt: str | None = None, block_size: int = BLOCK, key: str = "", weight: float = 1.0,
) -> Request:  # fmt: skip
    """Return a vLLM request.

    ``adapter`` is the adapter's number (0: none); ``regex`` is a structured-output constraint; ``key`` is the
    API key that sent it.
    """
    tokens = [hash((name, at)) % 50_000 for at in range(prompt)] if isinstance(prompt, int) else list(prompt)
    grammar = None if regex is None else StructuredOutputsParams(regex=regex)
    sampling = SamplingParams(
        max_tokens=max_tokens, temperature=0, stop=stop, structured_outputs=grammar,
        extra_args={"tonnage_key": key, "tonnage_weight": weight} if key else None,
    )  # fmt: skip
    sampling.update_from_generation_config({}, EOS)
    return Request(
        name, tokens, sampling, None, arrival_time=arrival, priority=priority, block_hasher=hasher(block_size),
        cache_salt=salt,
        lora_request=LoRARequest(str(adapter), adapter, f"/adapters/{adapter}") if adapter else None,
    )  # fmt: skip


def blocks_conserve(made: Any) -> None:
    """Assert that every block is free or referenced, as often as block tables name it."""
    pool = made.kv_cache_manager.block_pool
    named: Counter[int] = Counter()
    for manager in made.kv_cache_manager.coordinator.single_type_managers:
        for table in manager.req_to_blocks.values():
            named.update(block.block_id for block in table if not block.is_null)
    for block in pool.blocks[1:]:
        assert block.ref_cnt == named[block.block_id]
    assert pool.get_num_free_blocks() == sum(block.ref_cnt == 0 for block in pool.blocks[1:])


@dataclass
class World:
    """A scheduler and the engine core's loop around it.

    ``outputs`` maps request ids to true output lengths. ``drafts`` gives the lengths of drafts and how much of
    each is accepted. ``interval`` is the number of steps between steps that may prefill, as in data-parallel
    serving.
    """

    scheduler: Any
    outputs: dict[str, int] = field(default_factory=dict)
    ended: dict[str, EngineCoreOutput] = field(default_factory=dict)
    produced: dict[str, int] = field(default_factory=dict)
    preemptions: int = 0
    steps: int = 0
    law: Callable[[Any], None] | None = None
    interval: int = 1
    drafts: random.Random = field(default_factory=lambda: random.Random(0))
    _flight: deque[SchedulerOutput] = field(default_factory=deque)

    def __post_init__(self) -> None:
        # As EngineCore: with async scheduling a step is scheduled before the one before has come back.
        self._deep = 2 if self.scheduler.scheduler_config.async_scheduling else 1
        plain = self.scheduler._preempt_request

        def counted(*args: Any, **named: Any) -> None:
            self.preemptions += 1
            plain(*args, **named)

        self.scheduler._preempt_request = counted

    def add(self, made: Request, output: int) -> None:
        self.outputs[made.request_id] = output
        self.scheduler.add_request(made)

    def step(self) -> SchedulerOutput:
        output: SchedulerOutput = self.scheduler.schedule(self.steps % self.interval != 0)
        self.scheduled(output)
        return output

    def scheduled(self, output: SchedulerOutput) -> None:
        """Schedule one step; when the maximum is in flight, complete the oldest."""
        self.steps += 1
        if self.law is not None:
            self.law(self.scheduler)
        self._flight.append(output)
        if len(self._flight) == self._deep:
            self.land()

    def land(self) -> None:
        """Complete the oldest step in flight."""
        output = self._flight.popleft()
        ids = list(output.num_scheduled_tokens)
        sampled = []
        for id in ids:
            held = self.scheduler.requests.get(id)
            sampled.append([] if held is None else self._tokens(held, output))
        if ids:
            back = ModelRunnerOutput(ids, {id: at for at, id in enumerate(ids)}, sampled)
        else:
            back = EMPTY_MODEL_RUNNER_OUTPUT
        for outs in self.scheduler.update_from_output(output, back).values():
            for each in outs.outputs:
                self.produced[each.request_id] = self.produced.get(each.request_id, 0) + len(each.new_token_ids)
                if each.finish_reason is not None:
                    assert each.request_id not in self.ended
                    self.ended[each.request_id] = each

        if self.scheduler.num_spec_tokens and self._deep == 1:
            self._draft([id for id, tokens in zip(ids, sampled, strict=True) if tokens])

    def _draft(self, ids: list[str]) -> None:
        """Give each request a draft of random length, as EngineCore.post_step without async scheduling."""
        most = self.scheduler.num_spec_tokens
        drafts = [[7] * self.drafts.randint(0, most) for _ in ids]
        self.scheduler.update_draft_token_ids(DraftTokenIds(ids, drafts))

    def _tokens(self, held: Request, output: SchedulerOutput) -> list[int]:
        """Return what the step sampled for a request: one token, and the accepted tokens of its draft."""
        computed = self._computed(held.request_id, output) + output.num_scheduled_tokens[held.request_id]
        if computed < held.num_tokens:
            return []  # a chunk of its prompt
        draft = len(output.scheduled_spec_decode_tokens.get(held.request_id, ()))
        count = 1 + self.drafts.randint(0, draft)
        left = self.outputs[held.request_id] - self.produced.get(held.request_id, 0)
        return [7] * count if count < left else [7] * (left - 1) + [EOS]

    @staticmethod
    def _computed(id: str, output: SchedulerOutput) -> int:
        for new in output.scheduled_new_reqs:
            if new.req_id == id:
                return int(new.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        return int(cached.num_computed_tokens[cached.req_ids.index(id)])

    def abort(self, id: str) -> None:
        self.scheduler.finish_requests(id, RequestStatus.FINISHED_ABORTED)

    def run(self, limit: int = 20_000) -> None:
        """Run steps until every request has ended."""
        while self.scheduler.has_unfinished_requests() or self._flight:
            if self.scheduler.has_unfinished_requests():
                self.step()
            else:
                self.land()
            limit -= 1
            assert limit > 0, "it does not end"
