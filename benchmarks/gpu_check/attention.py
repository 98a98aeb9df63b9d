"""Step `attention`: each attention kernel against the model's own attention, and `generate`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from tonnage.server.engines.hf.attention import cuda
from tonnage.server.engines.hf.model.runner import ModelRunner
from tonnage.server.engines.hf.model.selfcheck import self_check
from tonnage.server.engines.hf.scheduler import HFScheduler

from .models import HEADS, Target, spec, with_heads, write
from .rows import FAILED, OFF, OK, Row, skipped
from .serving import generated, prompts_of, serve

# Prompts of one token, below and above a block, above a window of 24, and longer than the token budget.
_LENGTHS = [1, 15, 17, 70, 130]
_TOKENS = 12


def run(target: Target) -> Iterator[Row]:
    """Yield one row per model, dtype and kernel, then the throughput of each kernel."""
    for dtype in ("float32", "bfloat16"):
        for shape in (*(with_heads(*heads) for heads in HEADS), spec("windows", target.device)):
            yield from _kernels(target, write(shape, target.folder, dtype), f"{shape.name}, {dtype}", dtype)
        if target.model is not None:
            yield from _kernels(target, target.model, f"{target.model.name}, {dtype}", dtype)
    yield from _throughput(target)


def _runner(target: Target, folder: Path, dtype: str, **flags: int) -> ModelRunner:
    """Load a model; in bfloat16 on a GPU with blocks of 256 tokens, which every kernel can read."""
    if target.device == "cuda" and dtype == "bfloat16":
        flags["block_size"] = 256
    return ModelRunner(target.plan(folder, dtype, **flags))


def _kernels(target: Target, folder: Path, label: str, dtype: str) -> Iterator[Row]:
    """Check every kernel that can read the pool of one model; the reference is the last."""
    # The budget cuts the longest prompts into chunks.
    runner = _runner(target, folder, dtype, max_model_len=512, max_num_batched_tokens=64)
    yield from _unusable(runner, label)
    prompts = prompts_of(_LENGTHS, runner.vocab_size)
    # bfloat16 rounds a long and a short batch differently, so its answers are compared only for information.
    wanted = generated(runner, prompts, _TOKENS) if dtype == "float32" else None
    while True:
        try:
            yield _check(runner, f"{runner.attention}, {label}", prompts, wanted)
        except Exception as error:  # a kernel may raise any error on a device it was not built for
            yield Row(
                f"{runner.attention}, {label}",
                "failed",
                verdict=FAILED,
                note=f"{type(error).__name__}: {error}"[:300],
            )
        if not runner.next_attention():
            return


def _check(runner: ModelRunner, name: str, prompts: list[list[int]], wanted: list[list[int]] | None) -> Row:
    """Run the self-check, then serve the prompts in chunks, and again with prefix hits, with one kernel."""
    error = self_check(runner)
    scheduler = HFScheduler(runner.plan)
    first = serve(runner, prompts, _TOKENS, scheduler)
    again = serve(runner, prompts, _TOKENS, scheduler)
    assert scheduler.manager.sample_invariants() is None
    repeated = sum(one == two for one, two in zip(first.tokens, again.tokens, strict=True))
    note = f"again with {sum(again.cached)} cached tokens: {repeated} of {len(prompts)} answers equal"
    verdict = OK
    if wanted is not None:
        equal = sum(one == two for one, two in zip(first.tokens, wanted, strict=True))
        note = f"{equal} of {len(prompts)} answers equal to generate; {note}"
        verdict = OK if equal == repeated == len(prompts) else OFF
    return Row(name, error, "relative error of the logits", verdict=verdict, note=note)


def _unusable(runner: ModelRunner, label: str) -> Iterator[Row]:
    """Yield each GPU kernel that cannot read the pool, with the reason."""
    if runner.device.type != "cuda":
        return
    layout = runner.pool.layout
    dtype = str(next(runner.model.parameters()).dtype).removeprefix("torch.")
    stored = str(runner.pool.dtype).removeprefix("torch.")
    wanted = cuda.Wanted(dtype, stored, layout.block_size, layout.head_size)
    for name in cuda.KERNELS:
        why = cuda.why_not(name, wanted, torch.cuda.get_device_capability())
        if why is not None:
            yield skipped(f"{name}, {label}", why)


def _throughput(target: Target) -> Iterator[Row]:
    """Yield the output tokens per second of each kernel, with 16 sequences of the small model in bfloat16."""
    runner = _runner(target, write(spec("small", target.device), target.folder, "bfloat16"), "bfloat16")
    prompts = prompts_of([64] * 16, runner.vocab_size)
    while True:
        try:
            serve(runner, prompts, 2)  # compiles, and fills caches of the kernel
            yield Row(f"{runner.attention}, 16 x (64 + 32) tokens", serve(runner, prompts, 32).rate, "tokens/s")
        except Exception as error:  # as in `_kernels`
            yield Row(
                f"{runner.attention}, throughput",
                "failed",
                verdict=FAILED,
                note=f"{type(error).__name__}: {error}"[:300],
            )
        if not runner.next_attention():
            return
