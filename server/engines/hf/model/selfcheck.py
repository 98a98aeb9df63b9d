"""The start-up self-check: a comparison of paged attention with the model's own attention.

The check computes a mixed flat batch: prefill chunks and decodes of several sequences, in scattered blocks. It
compares the logits with transformers' eager attention, one sequence at a time. It shows that every layer of the
loaded model calls the paged attention, that sequences do not mix, and that masks and positions are correct.
"""

from __future__ import annotations

import numpy as np
import torch

from tonnage.planner.errors import DoesNotFit, TonnageError, UnsupportedArchitecture
from tonnage.planner.model.layout import KVLayout
from tonnage.server.engines.hf.attention.interface import NAME
from tonnage.server.engines.hf.batch import Batch, batch_of
from tonnage.server.engines.hf.model.fuse import plain
from tonnage.server.engines.hf.model.runner import ModelRunner

# Permitted relative error (L2) of the logits of one prompt. Measured on SmolLM2-135M: float32 2e-6, float16
# 0.002; bfloat16 0.02, at most 0.08 over 40 random prompts of 1 to 40 tokens. On these prompts the model's own
# bfloat16 code differs from float32 by up to 0.06. A model that mixes sequences or ignores a mask differs by
# more than 0.3.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
# Permitted relative error of the logits if K and V are stored in a narrower dtype than the model's. Measured on
# SmolLM2-135M in float32: float16 0.0005, bfloat16 0.005, fp8 0.04 (with and without scales), int8 0.03; in
# bfloat16: fp8 0.05, int8 0.07.
STORED_TOLERANCE = {torch.float16: 0.05, torch.bfloat16: 0.1, torch.float8_e4m3fn: 0.2, torch.int8: 0.2}

# The check's prompts fill sliding windows up to this length in tokens. Filling a longer window would take
# seconds.
LONGEST_WINDOW = 1024


class OtherLogits(UnsupportedArchitecture):
    """An error of the self-check: the logits differ between paged attention and the model's own attention."""


def self_check(runner: ModelRunner) -> float:
    """Return the largest relative error of the logits by paged attention, over a few test prompts.

    The check overwrites blocks of the KV pool, so it must run before the first request.

    Raises:
        OtherLogits: the error exceeds the tolerance.
        UnsupportedArchitecture: some layers do not call the paged attention.
        DoesNotFit: the pool is too small for the check.
    """
    config = runner.model.config.get_text_config()
    layers = config.num_hidden_layers
    layout = runner.plan.kv_cache.layout
    rng = np.random.default_rng(0)
    windows = [group.window for group in layout.groups if group.window and group.window <= LONGEST_WINDOW]
    lengths = (7, 1, max([2 * layout.block_size, *windows]) + 3)
    room = runner.plan.deployment.max_model_len or max(lengths)
    prompts = [rng.integers(0, config.vocab_size, min(length, room)) for length in lengths]
    tables = _scattered_tables(layout, runner.plan.kv_cache.num_blocks, prompts)
    worst = 0.0
    wanted = [_reference(runner, prompt) for prompt in prompts]
    done = [0] * len(prompts)
    for step in range(3):
        counts = [_chunk(len(p), done[i], step) for i, p in enumerate(prompts)]
        batch = _batch(layout, prompts, tables, done, counts)
        logits = runner.forward(batch).float()
        if runner.attention_calls != layers:
            raise UnsupportedArchitecture(
                f"{config.model_type!r} called the paged attention in {runner.attention_calls} of its "
                f"{layers} layers",
                field="model_type",
                hint="use --backend vllm",
            )
        at = 0
        for number, count in enumerate(counts):
            if count:
                got = logits[at : at + count]
                want = wanted[number][done[number] : done[number] + count]
                worst = max(worst, float((got - want).norm() / want.norm()))
            at += count
            done[number] += count
    dtype = next(p.dtype for p in runner.model.parameters() if p.is_floating_point())
    tolerance = max(TOLERANCE[dtype], STORED_TOLERANCE.get(runner.pool.dtype, 0.0))
    if not worst <= tolerance:
        raise OtherLogits(
            f"{config.model_type!r} gives other logits through the paged attention than through its own "
            f"(relative error {worst:.3g}, at most {tolerance} allowed)",
            field="model_type",
            hint="use --backend vllm",
        )
    return worst


def checked_attention(runner: ModelRunner) -> float:
    """Try implementations of attention until one passes `self_check`; return its relative error of the logits.

    Failures are logged. If the last implementation, the reference, fails too, its error is raised.
    """
    while True:
        try:
            return self_check(runner)
        except Exception as error:  # a kernel may raise any error on a device it was not built for
            if isinstance(error, TonnageError) and not isinstance(error, OtherLogits):
                raise  # the model or the plan caused the error, so every implementation would fail
            said = str(getattr(error, "message", error)).strip().splitlines() or [type(error).__name__]
            if not runner.next_attention(f"{runner.attention} failed the self-check ({said[0][:300]})"):
                raise


def _chunk(length: int, done: int, step: int) -> int:
    """Return how many tokens of a test prompt to compute in a step.

    The first step computes half of the ``length`` tokens, the next step all but the last token, the third step
    the last.
    """
    target = (max(1, length // 2), max(1, length - 1), length)[step]
    return max(0, min(length, target) - done)


@torch.inference_mode()
def _reference(runner: ModelRunner, prompt: np.ndarray) -> torch.Tensor:
    runner.model.set_attn_implementation("eager")  # sdpa does not support all features, such as capped scores
    try:
        ids = torch.from_numpy(prompt)[None].to(runner.device)
        with plain(runner.model):
            logits: torch.Tensor = runner.model(input_ids=ids, use_cache=False).logits
            return logits[0].float()
    finally:
        runner.model.set_attn_implementation(NAME)


def _scattered_tables(layout: KVLayout, num_blocks: int, prompts: list[np.ndarray]) -> list[list[np.ndarray]]:
    """Return block tables for the test prompts, by [sequence][group], with scattered block ids.

    The ids are taken from both ends of the pool in turn. So the ids in a table are not ascending, and the
    check detects code that assumes an order.
    """
    free = list(range(1, num_blocks))
    tables = []
    for prompt in prompts:
        blocks = -(-len(prompt) // layout.block_size)
        if blocks * len(layout.groups) > len(free):
            raise DoesNotFit(
                "the KV pool is too small for the self-check",
                field="--kv-cache-memory-bytes",
                hint="give a larger value",
            )
        tables.append(
            [
                np.array([free.pop(0 if i % 2 else -1) for i in range(blocks)], dtype=np.int32)
                for _ in layout.groups
            ]
        )
    return tables


def _batch(
    layout: KVLayout,
    prompts: list[np.ndarray],
    tables: list[list[np.ndarray]],
    done: list[int],
    counts: list[int],
) -> Batch:
    picked = [i for i, count in enumerate(counts) if count]
    width = max(len(tables[i][0]) for i in picked)
    padded = np.zeros((len(layout.groups), len(picked), width), dtype=np.int32)
    for row, i in enumerate(picked):
        for group, table in enumerate(tables[i]):
            padded[group, row, : len(table)] = table
    token_ids = np.concatenate([prompts[i][done[i] : done[i] + counts[i]] for i in picked])
    return batch_of(
        token_ids,
        np.array([done[i] for i in picked], dtype=np.int64),
        np.array([counts[i] for i in picked], dtype=np.int64),
        [*padded],
        layout.block_size,
        np.arange(len(token_ids)),
    )
