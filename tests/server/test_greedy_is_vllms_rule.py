"""Greedy mode against vLLM's own Scheduler: the same chunks, preemptions and admissions in every step."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from invariants import check_invariants
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler as VllmScheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from tonnage.cache.admission import AdmissionMode, Policy
from tonnage.cache.manager import KVCacheManager
from tonnage.cache.scheduler import Scheduler, Sequence
from tonnage.planner.model.layout import KVGroup, KVLayout

BLOCKS, SEQUENCES, BUDGET, LONGEST = 65, 24, 64, 320
# per step: tokens by request, in batch order; the preempted requests
Steps = list[tuple[dict[int, int], set[int]]]


@dataclass(slots=True, eq=False, kw_only=True)
class Named(Sequence):
    answer: int

    def token_ids(self) -> np.ndarray:
        return np.full(self.length, self.id, np.int32)


def loads(count: int) -> list[tuple[int, int, int]]:
    """Return ``count`` random requests: (arrival step, prompt tokens, output tokens)."""
    draw = np.random.default_rng(7)
    return [
        (int(at), int(draw.integers(1, 200)), int(draw.integers(1, 64)))
        for at in np.sort(draw.integers(0, 300, count))
    ]


def ours(todo: list[tuple[int, int, int]]) -> Steps:
    layout = KVLayout((KVGroup("full", (0,)),), 16, 1, 1, 8, "float32", 4)
    manager = KVCacheManager(
        layout,
        BLOCKS,
        max_num_seqs=SEQUENCES,
        max_model_len=LONGEST,
        max_num_batched_tokens=BUDGET,
        enable_prefix_caching=False,
        policy=Policy(AdmissionMode.GREEDY),
    )
    scheduler: Scheduler[Named] = Scheduler(manager, budget=BUDGET)
    steps: Steps = []
    while todo or not scheduler.idle:
        while todo and todo[0][0] <= len(steps):
            at, prompt, answer = todo.pop(0)
            scheduler.add(Named(prompt=prompt, max_tokens=answer, arrival=float(at), answer=answer))
        step = scheduler.step()
        steps.append(({s.id: s.chunk for s in step.picked}, {s.id for s in step.preempted}))
        if step.picked:
            scheduler.computed(step.picked)
        going = [s for s in step.drawing if s.generated + 1 < s.answer]
        for sequence in [s for s in step.drawing if s.generated + 1 == s.answer]:
            scheduler.end(sequence, sequence.answer)
        if going:
            scheduler.append(going, [7] * len(going))
        check_invariants(manager)
    return steps


def theirs(todo: list[tuple[int, int, int]], folder: Path) -> Steps:
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 512, "hidden_size": 16,
        "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
        "max_position_embeddings": 512,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    model = ModelConfig(
        model=str(folder), skip_tokenizer_init=True, dtype="float32", max_model_len=LONGEST, seed=0
    )
    setup = VllmConfig(
        model_config=model,
        scheduler_config=SchedulerConfig(
            max_num_seqs=SEQUENCES,
            max_num_batched_tokens=BUDGET,
            max_model_len=LONGEST,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=False,
        ),
        cache_config=CacheConfig(block_size=16, enable_prefix_caching=False),
        parallel_config=ParallelConfig(),
        device_config=DeviceConfig("cpu"),
    )
    setup.cache_config.num_gpu_blocks = BLOCKS
    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32)
    scheduler = VllmScheduler(
        vllm_config=setup,
        kv_cache_config=KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(["layer"], spec)]),
        log_stats=False,
        block_size=16,
        structured_output_manager=StructuredOutputManager(setup),
    )
    steps: Steps = []
    count = 0
    while todo or scheduler.has_unfinished_requests():
        while todo and todo[0][0] <= len(steps):
            at, prompt, answer = todo.pop(0)
            params = SamplingParams(max_tokens=answer, ignore_eos=True)
            params.update_from_generation_config({}, 2)
            tokens = [3 + count % 500] * prompt
            scheduler.add_request(Request(str(count), tokens, params, None, arrival_time=float(at)))
            count += 1
        before = {request.request_id for request in scheduler.running}
        out = scheduler.schedule()
        ids = list(out.num_scheduled_tokens)
        gone = before - {request.request_id for request in scheduler.running}
        steps.append(({int(i): n for i, n in out.num_scheduled_tokens.items()}, set(map(int, gone))))
        known = [scheduler.requests[i] for i in ids]
        drawn = [[7] if r.num_computed_tokens >= r.num_tokens else [] for r in known]
        scheduler.update_from_output(
            out,
            ModelRunnerOutput(
                req_ids=ids,
                req_id_to_index={i: place for place, i in enumerate(ids)},
                sampled_token_ids=drawn,
                logprobs=None,
                prompt_logprobs_dict={},
                pooler_output=[],
            ),
        )
    return steps


def test_greedy_admission_mode_decides_like_vllms_scheduler_in_every_step(tmp_path: Path) -> None:
    wanted = theirs(loads(150), tmp_path)
    got = ours(loads(150))
    assert sum(len(preempted) for _, preempted in wanted) > 20
    for step, (one, two) in enumerate(zip(wanted, got, strict=True)):
        assert one == two, f"step {step}"
