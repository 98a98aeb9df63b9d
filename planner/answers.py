"""The other direction: what would make it fit, and the commands that serve a plan."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from tonnage.planner.build import plan_source
from tonnage.planner.errors import TonnageError
from tonnage.planner.extras import made_while_loading
from tonnage.planner.plans import Deployment, Plan
from tonnage.planner.records import replace
from tonnage.planner.source import ModelSource
from tonnage.planner.units import gib

_MOST_RANKS = 16
_MOST_CHANGES = 4


def advise(source: ModelSource, deployment: Deployment) -> tuple[str, ...]:
    """Single changes that make it fit, smallest first: flags, then formats, then more memory."""
    out = []
    for words, changed in _candidates(source, deployment):
        try:
            plan = plan_source(source, changed)
        except TonnageError:
            continue
        if plan.fits:
            out.append(f"{words}: {plan.kv_cache.max_concurrency:.1f} sequences of "
                       f"{plan.deployment.max_model_len:,} tokens")  # fmt: skip
        if len(out) == _MOST_CHANGES:
            break
    return tuple(out)


def _candidates(source: ModelSource, flags: Deployment) -> Iterator[tuple[str, Deployment]]:
    try:
        now = plan_source(source, flags)
    except TonnageError:
        return
    chosen = now.deployment
    longest = now.kv_cache.longest or 0
    if longest and chosen.max_model_len and longest < chosen.max_model_len:
        yield f"--max-model-len {longest}", replace(flags, max_model_len=longest)
    if flags.kv_cache_memory_bytes:
        room = now.rank.total_bytes - (now.rank.used_bytes - now.rank.kv_pool_bytes)
        if 0 < room < flags.kv_cache_memory_bytes:
            yield f"--kv-cache-memory-bytes {room}", replace(flags, kv_cache_memory_bytes=room)
        need = now.kv_cache.bytes_per_sequence + now.kv_cache.layout.bytes_per_block
        if need > flags.kv_cache_memory_bytes:
            yield f"--kv-cache-memory-bytes {need}", replace(flags, kv_cache_memory_bytes=need)
    if chosen.engine == "vllm" and not flags.enforce_eager:
        yield "--enforce-eager", replace(flags, enforce_eager=True)
    for seqs in (256, 64, 16):
        if chosen.max_num_seqs and chosen.max_num_seqs > seqs:
            tokens = min(chosen.max_num_batched_tokens or 2048, 2048)
            yield (
                f"--max-num-seqs {seqs} --max-num-batched-tokens {tokens}",
                replace(flags, max_num_seqs=seqs, max_num_batched_tokens=tokens),
            )
    used = chosen.gpu_memory_utilization or 1.0
    if used < 0.95:
        yield "--gpu-memory-utilization 0.95", replace(flags, gpu_memory_utilization=0.95)
    if chosen.engine in ("vllm", "sglang") and flags.kv_cache_dtype == "auto":
        yield "--kv-cache-dtype fp8", replace(flags, kv_cache_dtype="fp8")
    if chosen.quantization is None:
        for scheme in ("int8", "nf4"):
            yield f"--quantization {scheme}", replace(flags, quantization=scheme)
    if chosen.engine != "hf":
        ranks = chosen.tensor_parallel_size * 2
        while ranks <= _MOST_RANKS:
            yield f"--tensor-parallel-size {ranks}", replace(flags, tensor_parallel_size=ranks)
            ranks *= 2
    without_pool = now.rank.used_bytes - now.rank.kv_pool_bytes + now.kv_cache.bytes_per_sequence
    share = 1.0 if flags.kv_cache_memory_bytes else used
    memory = int((without_pool + now.kv_cache.layout.bytes_per_block * 2) / share) + (1 << 20)
    yield f"a device of {gib(memory)}", replace(flags, gpu=None, device=chosen.device, device_memory=memory)


def serve_lines(plan: Plan) -> tuple[str, ...]:
    """Commands that serve this plan: ours, and vLLM's own where it can."""
    flags = plan.deployment
    model = "demo" if plan.model.id == "demo" else plan.model.id
    out = []
    if flags.engine in ("hf", "vllm"):
        ours = ["tonnage", "serve", model, "--backend", flags.engine, *_common(plan)]
        if flags.device != "cpu":
            ours += ["--device", flags.device]
        if flags.tensor_parallel_size > 1:
            ours += ["--tensor-parallel-size", str(flags.tensor_parallel_size)]
        if flags.engine == "hf" and flags.quantization in made_while_loading("hf"):
            ours += ["--quantization", flags.quantization]
        out.append(shlex.join(ours))
    if flags.engine == "vllm":
        out.append(shlex.join(["vllm", "serve", model, *_common(plan), *_vllm_only(plan)]))
    if flags.engine == "sglang":
        line = ["python", "-m", "sglang.launch_server", "--model-path", model, "--context-length",
                str(flags.max_model_len), "--tp-size", str(flags.tensor_parallel_size)]  # fmt: skip
        out.append(shlex.join(line))
    if flags.engine == "llama.cpp":
        k, _, v = flags.kv_cache_dtype.partition("/")
        shared = plan.kv_cache.layout.block_size * plan.kv_cache.num_blocks  # n_ctx is of all sequences
        line = ["llama-server", "-m", model, "-c", str(shared), "-np", str(flags.max_num_seqs),
                "-ub", str(flags.max_num_batched_tokens), "-ctk", k, "-ctv", v or k]  # fmt: skip
        out.append(shlex.join(line))
    return tuple(out)


def _common(plan: Plan) -> list[str]:
    flags = plan.deployment
    line = ["--max-model-len", str(flags.max_model_len), "--max-num-seqs", str(flags.max_num_seqs),
            "--max-num-batched-tokens", str(flags.max_num_batched_tokens), "--dtype", flags.dtype]  # fmt: skip
    if flags.kv_cache_memory_bytes is not None:
        line += ["--kv-cache-memory-bytes", str(flags.kv_cache_memory_bytes)]
    else:
        line += ["--gpu-memory-utilization", f"{flags.gpu_memory_utilization:g}"]
    if flags.kv_cache_dtype != flags.dtype:
        line += ["--kv-cache-dtype", flags.kv_cache_dtype]
    if not flags.enable_prefix_caching:
        line.append("--no-enable-prefix-caching")
    return line


def _vllm_only(plan: Plan) -> list[str]:
    flags = plan.deployment
    line: list[str] = []
    for name in ("tensor", "pipeline", "data"):
        value = getattr(flags, f"{name}_parallel_size")
        if value > 1:
            line += [f"--{name}-parallel-size", str(value)]
    if flags.decode_context_parallel_size > 1:
        line += ["--decode-context-parallel-size", str(flags.decode_context_parallel_size)]
    if flags.enable_expert_parallel:
        line.append("--enable-expert-parallel")
    if flags.enforce_eager:
        line.append("--enforce-eager")
    if flags.num_gpu_blocks_override is not None:
        line += ["--num-gpu-blocks-override", str(flags.num_gpu_blocks_override)]
    if flags.quantization in made_while_loading("vllm"):
        line += ["--quantization", "bitsandbytes" if flags.quantization == "nf4" else flags.quantization]
    if flags.cpu_offload_bytes:
        line += ["--cpu-offload-gb", f"{flags.cpu_offload_bytes / (1 << 30):g}"]
    if flags.enable_lora:
        line += ["--enable-lora", "--max-loras", str(flags.max_loras)]
        line += ["--max-lora-rank", str(flags.max_lora_rank)]
    if flags.speculative_model:
        import json

        draft = {"method": "mtp"} if flags.speculative_model == "mtp" else {"model": flags.speculative_model}
        draft_flags = {**draft, "num_speculative_tokens": flags.num_speculative_tokens}
        line += ["--speculative-config", json.dumps(draft_flags)]
    return line
