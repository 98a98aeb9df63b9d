"""Advice on a plan that does not fit (changes of one flag that make it fit), and commands that serve a plan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tonnage.planner.deployment import Deployment
from tonnage.planner.engines.parallel import accepted_ranks
from tonnage.planner.engines.registry import engine_of
from tonnage.planner.errors import TonnageError
from tonnage.planner.model.capacity import at_most
from tonnage.planner.planning.size import Size, Sizer
from tonnage.planner.plans import Plan
from tonnage.planner.source.resolve import ModelSource
from tonnage.planner.units import MAX_BYTES, ceil_div, gib

_MOST_RANKS = 16
_MOST_CHANGES = 4
_NODE = 8  # GPUs of one machine
_MOST_STAGES = 32  # maximum number of pipeline stages that advice may recommend
# Advice on another weight format or parallel size sums the weights again, which takes 10 us per tensor. It is
# given only for models with at most this number of tensors. Published models have at most 2,201 tensors
# (DeepSeek-V4-Pro).
_MOST_TENSORS = 10_000


def advise(source: ModelSource, deployment: Deployment, sizer: Sizer | None = None) -> tuple[str, ...]:
    """Return changes of a single flag, each of which makes the model fit.

    Each change is one line of text: the flag, how many sequences then run at once, and their length in tokens.
    Changes that leave the weights as they are come first, then other weight formats, then more memory. The last
    line is the smallest layout of GPUs that fits, unless an earlier line has it. The result is empty if
    `deployment` cannot be planned at all, because a flag is invalid or the engine refuses it.

    Args:
        source: the model.
        deployment: the flags of the plan that does not fit.
        sizer: the `Sizer` of an earlier plan of `source`, which has summed the weights already; or None.
    """
    sizer = sizer or Sizer(source)
    out: list[str] = []
    try:
        now = sizer.size(deployment)
    except TonnageError:
        return ()
    if (layers := _most_layers(now, deployment, sizer)) is not None:
        out.append(layers)
    for words, changed in _candidates(now, deployment):
        try:
            size = sizer.size(changed)
        except TonnageError:
            continue
        if not size.reasons and size.support.runs:
            out.append(_line(words, size))
        if len(out) == _MOST_CHANGES:
            break
    if (line := smallest_layout(deployment, sizer)) is not None:
        flags_only = line.partition(" (")[0] + ":"
        if not any(said.startswith(flags_only) for said in out):
            out.append(line)
    return tuple(out)


def _line(words: str, size: Size) -> str:
    running = at_most(size.held.max_concurrency, size.chosen.max_num_seqs)
    return f"{words}: {running:.1f} sequences of {size.chosen.max_model_len:,} tokens"


def _most_layers(now: Size, flags: Deployment, sizer: Sizer) -> str | None:
    """Return a line of advice with the largest --n-gpu-layers of llama.cpp that fits, or None if none fits."""
    chosen = now.chosen.flags
    partial = engine_of(chosen.engine).sized_by_context and chosen.device == "cuda"
    if not partial or chosen.tensor_parallel_size * chosen.pipeline_parallel_size > 1:
        return None
    found, low, high = None, 2, chosen.n_gpu_layers or now.architecture.layers + 1
    while low < high:  # Bisection is possible because memory grows with the number of layers on the GPU.
        middle = (low + high) // 2
        try:
            size = sizer.size(replace(flags, n_gpu_layers=middle))
        except TonnageError:
            return None
        if size.reasons:
            high = middle
        else:
            low, found = middle + 1, _line(f"--n-gpu-layers {middle}", size)
    return found


def smallest_layout(flags: Deployment, sizer: Sizer) -> str | None:
    """Return advice with the layout that needs the fewest GPUs of the plan's kind; None if no layout fits.

    For at most 8 GPUs (one machine), every combination of tensor and pipeline parallel size is tried. For more
    GPUs, each pipeline stage is a whole machine. The result is also None for engines that do not divide a
    model, and for models with more than 10,000 tensors, whose weights take too long to sum again.
    """
    try:
        now = sizer.size(flags)
    except TonnageError:
        return None
    chosen = now.chosen.flags
    small = len(now.architecture.tensors) <= _MOST_TENSORS and now.support.runs
    if not (small and engine_of(chosen.engine).divides and chosen.device == "cuda" and now.chosen.limit > 0):
        return None
    whole = sum(stage.rank.weights_bytes for stage in now.stages) * chosen.tensor_parallel_size
    least = max(1, ceil_div(whole, now.chosen.limit))
    ranks = [count for count in accepted_ranks(now.architecture, _NODE) if _NODE % count == 0]
    pairs = [
        (tensor, count // tensor)
        for count in range(least, _NODE + 1)
        for tensor in reversed(ranks)
        if count % tensor == 0
    ]
    widest = max(ranks)
    machines = range(max(2, ceil_div(least, widest)), min(_MOST_STAGES, now.architecture.layers) + 1)
    pairs += [(widest, stages) for stages in machines]
    for tensor, stages in pairs:
        changed = replace(flags, tensor_parallel_size=tensor, pipeline_parallel_size=stages)
        try:
            size = sizer.size(changed)
        except TonnageError:
            continue
        if size.reasons or not size.support.runs:
            continue
        words = f"--tensor-parallel-size {tensor}" if tensor > 1 else ""
        words += f" --pipeline-parallel-size {stages}" if stages > 1 else ""
        where = f", {stages} machines of {widest}" if tensor * stages > _NODE else ""
        return _line(f"{words.strip()} ({tensor * stages} GPUs{where}, the smallest layout)", size)
    return None


def _candidates(now: Size, flags: Deployment) -> Iterator[tuple[str, Deployment]]:
    """Yield (description, flags with the change) for each change of one flag that may make the model fit.

    The changes come in order of preference.
    """
    chosen, rank = now.chosen.flags, now.worst.rank
    engine = engine_of(chosen.engine)
    longest = now.longest
    if longest and chosen.max_model_len and longest < chosen.max_model_len:
        yield f"--max-model-len {longest}", replace(flags, max_model_len=longest)
    if flags.kv_cache_memory_bytes:
        room = rank.total_bytes - (rank.used_bytes - rank.kv_pool_bytes)
        if 0 < room < flags.kv_cache_memory_bytes:
            yield f"--kv-cache-memory-bytes {room}", replace(flags, kv_cache_memory_bytes=room)
        need = now.bytes_per_sequence + now.pool.layout.bytes_per_block
        if need > flags.kv_cache_memory_bytes:
            yield f"--kv-cache-memory-bytes {need}", replace(flags, kv_cache_memory_bytes=need)
    if engine.graphs and not flags.enforce_eager:
        yield "--enforce-eager", replace(flags, enforce_eager=True)
    for seqs in (256, 64, 16):  # Numbers of sequences between these three hardly change the memory.
        if chosen.max_num_seqs and chosen.max_num_seqs > seqs:
            tokens = min(chosen.max_num_batched_tokens or 2048, 2048)
            yield (
                f"--max-num-seqs {seqs} --max-num-batched-tokens {tokens}",
                replace(flags, max_num_seqs=seqs, max_num_batched_tokens=tokens),
            )
    used = chosen.gpu_memory_utilization or 1.0
    if used < 0.95:
        yield "--gpu-memory-utilization 0.95", replace(flags, gpu_memory_utilization=0.95)
    if now.support.refused and flags.kv_cache_dtype != "auto":
        yield "--kv-cache-dtype auto", replace(flags, kv_cache_dtype="auto")
    if engine.fp8_kv_cache and flags.kv_cache_dtype == "auto":
        yield "--kv-cache-dtype fp8", replace(flags, kv_cache_dtype="fp8")
    small = len(now.architecture.tensors) <= _MOST_TENSORS
    if small and chosen.quantization is None:
        for scheme in engine.smaller[chosen.device]:
            yield f"--quantization {scheme}", replace(flags, quantization=scheme)
    if small and engine.divides:
        ranks = chosen.tensor_parallel_size * 2
        while ranks <= _MOST_RANKS:
            yield f"--tensor-parallel-size {ranks}", replace(flags, tensor_parallel_size=ranks)
            ranks *= 2
    without_pool = rank.used_bytes - rank.kv_pool_bytes + now.bytes_per_sequence
    share = 1.0 if flags.kv_cache_memory_bytes else used
    needed = (without_pool + now.pool.layout.bytes_per_block * 2) / share
    if needed < MAX_BYTES:
        memory = int(needed) + (1 << 20)
        yield f"a device of {gib(memory)}", replace(flags, gpu=None, device=chosen.device, device_memory=memory)


def serve_lines(plan: Plan) -> tuple[str, ...]:
    """Return the shell commands that serve `plan`: `tonnage serve`, and the engine's own command if any."""
    return engine_of(plan.deployment.engine).serve_lines(plan)
