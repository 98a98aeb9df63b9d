"""GPU attention, as far as it can be tested without a GPU; selection and fallback of kernels.

FlexAttention runs on the CPU. FlashAttention and FlashInfer are replaced by stand-ins that record their
arguments and compute with the reference.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM

from tonnage.cache.admission import Limits
from tonnage.planner.deployment import Deployment
from tonnage.planner.engines.runtime.hf import FLASHINFER_WORKSPACE_BYTES
from tonnage.planner.model.layout import KVGroup, KVLayout
from tonnage.planner.planning.build import make_plan
from tonnage.server.commands import doctor
from tonnage.server.engines.capacity import limits_of
from tonnage.server.engines.hf.attention import cuda
from tonnage.server.engines.hf.attention.flash import FlashAttention
from tonnage.server.engines.hf.attention.flash_infer import FlashInferAttention
from tonnage.server.engines.hf.attention.flex import TILE, Buffers, FlexAttention
from tonnage.server.engines.hf.attention.gather import GatherAttention, attend
from tonnage.server.engines.hf.attention.interface import Candidate
from tonnage.server.engines.hf.batch import Batch
from tonnage.server.engines.hf.messages import Ready
from tonnage.server.engines.hf.model.profile import full_batch
from tonnage.server.engines.hf.model.runner import ModelRunner
from tonnage.server.engines.hf.model.selfcheck import OtherLogits, checked_attention, self_check
from tonnage.server.engines.hf.pool import PagedPool
from tonnage.server.engines.hf.scheduler import HFScheduler

TINY = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}

# (context after the step, queries of the step): decodes, a prompt, chunks longer than a tile, block borders.
LENGTHS = [(1, 1), (16, 1), (49, 1), (5, 5), (60, 37), (64, 16)]
CPU = torch.device("cpu")
FAR = 1e4  # in every slot that was never written: finite, or what is hidden would still be felt

# head size, KV heads, ratio, window, block size, softcap
CASES = [
    (64, 3, 3, None, 16, None),
    (64, 1, 1, 24, 32, None),
    (80, 1, 5, 20, 16, 30.0),
    (128, 2, 4, None, 64, 50.0),
    (128, 1, 12, 7, 16, None),
    (256, 1, 2, 33, 128, None),
]


def layout_of(block_size: int, kv_heads: int, head_size: int, window: int | None) -> KVLayout:
    """Return a layout with a full and a sliding-window group, to detect the wrong group's block table."""
    groups = (KVGroup("full", (0, 1), None), KVGroup("sliding", (2, 3), window or 1000))
    return KVLayout(groups, block_size, 2, kv_heads, head_size, "float32", 4)


def filled(layout: KVLayout, lengths: list[tuple[int, int]], seed: int) -> tuple[PagedPool, Batch]:
    """Return a pool with the contexts of ``lengths`` in scattered blocks, and the batch of the next step.

    Blocks outside a sliding window are the null block, as in the block manager.
    """
    rng = np.random.default_rng(seed)
    size = layout.block_size
    needed = [-(-length // size) for length, _ in lengths]
    pool = PagedPool(layout, 2 * sum(needed) + 1, CPU)
    pool.tensor.fill_(FAR)
    free = rng.permutation(np.arange(1, 2 * sum(needed) + 1)).tolist()
    tables, slots = [], []
    draw = torch.Generator().manual_seed(seed)
    for group in layout.groups:
        table, written = np.zeros((len(lengths), max(needed)), np.int32), []
        for i, (length, queries) in enumerate(lengths):
            gone = 0 if group.window is None else max(0, length - queries - group.window + 1) // size
            table[i, gone : needed[i]] = [free.pop() for _ in range(needed[i] - gone)]
            position = np.arange(gone * size, length)
            slot = table[i, position // size].astype(np.int64) * size + position % size
            old = slot[: len(slot) - queries]
            shape = (len(old), layout.layer_slots, 2, layout.kv_heads, layout.head_size)
            pool.tensor[old // size, :, :, old % size] = torch.randn(shape, generator=draw)
            written.append(slot[len(slot) - queries :])
        tables.append(table)
        slots.append(np.concatenate(written))
    queries = np.array([count for _, count in lengths])
    return pool, Batch(
        token_ids=np.zeros(queries.sum(), np.int64),
        positions=np.concatenate([np.arange(length - count, length) for length, count in lengths]),
        query_start=np.concatenate(([0], queries.cumsum())),
        kv_len=np.array([length for length, _ in lengths], np.int64),
        slots=tuple(slots),
        tables=tuple(tables),
        logits_at=np.zeros(0, np.int64),
    )


def compare(case: tuple[Any, ...], make: Any, lengths: list[tuple[int, int]] = LENGTHS) -> None:
    """Check that ``make(batch, pool)`` computes and stores the reference's values in each group and layer."""
    head_size, kv_heads, ratio, window, block_size, softcap = case
    layout = layout_of(block_size, kv_heads, head_size, window)
    pool, batch = filled(layout, lengths, seed=head_size + ratio)
    other = PagedPool(layout, len(pool.tensor), CPU)
    other.tensor.copy_(pool.tensor)
    tokens = int(batch.query_start[-1])
    mine, reference = make(batch, pool), GatherAttention(batch, other, kv_heads * ratio)
    for group, slot in itertools.product(range(2), range(2)):
        query = torch.randn(tokens, kv_heads * ratio, head_size)
        key, value = torch.randn(2, tokens, kv_heads, head_size)
        found = mine(group, slot, query, key, value, 1.3 * head_size**-0.5, softcap)
        want = reference(group, slot, query, key, value, 1.3 * head_size**-0.5, softcap)
        torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)
    assert torch.equal(pool.tensor, other.tensor)


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


def limits_for(layout: KVLayout, lengths: list[tuple[int, int]]) -> Limits:
    longest = max(length for length, _ in lengths)
    return Limits(layout, 1000, longest, len(lengths), sum(count for _, count in lengths))


def flex_attention(batch: Batch, pool: PagedPool) -> FlexAttention:
    return FlexAttention(batch, pool, Buffers(pool, limits_for(pool.layout, LENGTHS)))


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_output_of_flex_attention_equals_the_reference_implementation(
    case: tuple[Any, ...], eager: None
) -> None:
    compare(
        case, lambda batch, pool: FlexAttention(batch, pool, Buffers(pool, limits_for(pool.layout, LENGTHS)))
    )


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_flex_attention_accepts_batches_larger_than_server_limits(eager: None) -> None:
    def make(batch: Batch, pool: PagedPool) -> FlexAttention:
        return FlexAttention(batch, pool, Buffers(pool, Limits(pool.layout, 1000, 64, 1, 1)))

    compare(CASES[0], make)
    compare(CASES[1], make, [(30, 1)])


@pytest.mark.parametrize("case", CASES[:3], ids=str)
def test_flex_attention_block_mask_includes_every_visible_kv_block(case: tuple[Any, ...]) -> None:
    """Check the block mask: the compiled kernel reads only its blocks, the uncompiled one reads all blocks."""
    head_size, kv_heads, _, window, size, _ = case
    pool, batch = filled(layout_of(size, kv_heads, head_size, window), LENGTHS, seed=0)
    attention = flex_attention(batch, pool)
    for mask, group in zip(attention._masks, pool.layout.groups, strict=True):
        rows, slots = mask.seq_lengths
        seen = torch_flex.create_mask(mask.mask_mod, 1, 1, rows, slots, device="cpu")[0, 0]
        by_tile = seen.view(rows // TILE, TILE, slots // size, size).any(3).any(1)
        counts, read = mask.kv_num_blocks[0, 0].tolist(), mask.kv_indices[0, 0].tolist()
        for tile, (count, named) in enumerate(zip(counts, read, strict=True)):
            wanted, named = set(by_tile[tile].nonzero()[:, 0].tolist()), named[:count]
            assert wanted <= set(named)
            assert len(named) == len(set(named))
            if group.window is None:  # of a windowed chunk the later tiles could leave out the first blocks
                assert wanted == set(named)


def test_flex_attention_is_compiled_once_for_all_batch_shapes() -> None:
    """Run steps of several sizes with one torch trace and buffers that keep values of earlier steps."""
    layout = layout_of(16, 1, 64, 24)
    steps = [LENGTHS, [(33, 1), (40, 3)], [(7, 7)], [(20, 1)], LENGTHS[1:]]
    buffers: list[Buffers] = []
    graphs = []

    def make(batch: Batch, pool: PagedPool) -> FlexAttention:
        if not buffers:
            buffers.append(Buffers(pool, limits_for(layout, LENGTHS)))
            buffers[0].attend = torch.compile(torch_flex.flex_attention, backend=count, fullgraph=True)
        return FlexAttention(batch, pool, buffers[0])

    def count(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    for lengths in steps:
        compare((64, 1, 2, 24, 16, None), make, lengths)
    assert len(graphs) <= 4  # full and windowed; each once more when the number of queries first changed


class Packed:
    """Reference attention computed only from the blocks and lengths that a GPU kernel receives.

    The queries are the last tokens of their contexts.
    """

    @staticmethod
    def attention(
        q: torch.Tensor,
        kv: tuple[torch.Tensor, torch.Tensor],
        starts: list[int],
        blocks: list[list[int]],
        lengths: list[int],
        scale: float,
        left: int,
        softcap: float | None,
    ) -> torch.Tensor:
        output = torch.full_like(q, float("nan"))
        for i, (first, last) in enumerate(itertools.pairwise(starts)):
            k, v = (part[blocks[i]].flatten(0, 1)[: lengths[i]] for part in kv)
            ratio = q.shape[1] // k.shape[1]
            query, k, v = (t.transpose(0, 1)[None] for t in (q[first:last], k, v))
            at = torch.arange(lengths[i] - (last - first), lengths[i])[:, None]
            key = torch.arange(lengths[i])[None]
            mask = (key <= at) & (key >= at - left) if left >= 0 else key <= at
            repeated = (t.repeat_interleave(ratio, 1) for t in (k, v))
            output[first:last] = attend(query, *repeated, mask[None, None], scale, softcap)[0].transpose(0, 1)
        return output


def flash_stand_in(**given: Any) -> torch.Tensor:
    """Compute FlashAttention's result; accept only arguments that both of its builds accept."""
    table, lengths, starts = given["block_table"], given["seqused_k"], given["cu_seqlens_q"]
    assert {table.dtype, lengths.dtype, starts.dtype} == {torch.int32}
    assert given["q"].is_contiguous()
    assert given["k"].stride(-1) == given["v"].stride(-1) == table.stride(-1) == 1
    assert table.min() >= 0
    assert given["max_seqlen_q"] == starts.diff().max()
    assert given["max_seqlen_k"] == lengths.max()
    assert given["causal"]
    left, right = given["window_size"]
    assert right == (0 if left >= 0 else -1)
    return Packed.attention(
        given["q"], (given["k"], given["v"]), starts.tolist(), table.tolist(), lengths.tolist(),
        given["softmax_scale"], left, given["softcap"] or None,
    )  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_flash_attention_gets_exactly_the_kv_blocks_that_it_needs(case: tuple[Any, ...]) -> None:
    compare(case, lambda batch, pool: FlashAttention(batch, pool, flash_stand_in))


class FlashInferStandIn:
    """A stand-in for FlashInfer's BatchPrefillWithPagedKVCacheWrapper with layout NHD: ``plan`` and ``run``."""

    def __init__(self) -> None:
        self.plans = 0

    def plan(self, *given: Any, **named: Any) -> None:
        assert all(array.dtype == torch.int32 for array in given[:4])
        self.given, self.named = given, named
        self.plans += 1

    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        starts, blocks_from, blocks, last, heads, kv_heads, head_size, page = self.given
        assert q.shape[1:] == (heads, head_size)
        assert kv[0].shape[1:] == kv[1].shape[1:] == (page, kv_heads, head_size)
        assert kv[0].stride() == kv[1].stride()
        assert self.named["causal"]
        assert self.named["q_data_type"] == q.dtype
        assert self.named["kv_data_type"] == kv[0].dtype
        pairs = list(itertools.pairwise(blocks_from.tolist()))
        lengths = [(b - a - 1) * page + tail for (a, b), tail in zip(pairs, last.tolist(), strict=True)]
        return Packed.attention(
            q, kv, starts.tolist(), [blocks[a:b].tolist() for a, b in pairs], lengths,
            self.named["sm_scale"], self.named["window_left"], self.named["logits_soft_cap"],
        )  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_flashinfer_gets_exactly_the_kv_blocks_that_it_needs(case: tuple[Any, ...]) -> None:
    wrappers = [FlashInferStandIn(), FlashInferStandIn()]
    compare(case, lambda batch, pool: FlashInferAttention(batch, pool, wrappers))
    assert [wrapper.plans for wrapper in wrappers] == [1, 1]  # once for all layers of a group


@pytest.mark.parametrize("wrong", ["another sequence's table", "one token short", "one block late"])
def test_simulated_flash_attention_of_the_tests_detects_wrong_block_tables(wrong: str) -> None:
    def broken(**given: Any) -> torch.Tensor:
        if wrong == "another sequence's table":
            given["block_table"] = given["block_table"].roll(1, 0)
        elif wrong == "one token short":
            given["seqused_k"] = given["seqused_k"].clamp(min=2) - 1
            given["max_seqlen_k"] = int(given["seqused_k"].max())
        else:
            given["block_table"] = given["block_table"].roll(1, 1)
        return flash_stand_in(**given)

    with pytest.raises((AssertionError, RuntimeError)):
        compare(CASES[0], lambda batch, pool: FlashAttention(batch, pool, broken))


def test_attention_kernel_is_selected_by_gpu_capability_and_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_missing", lambda name: None)

    def best(capability: tuple[int, int] = (9, 0), **changes: Any) -> list[str]:
        wanted = {"dtype": "bfloat16", "stored": "bfloat16", "block_size": 16, "head_size": 128, **changes}
        return [name for name in cuda.KERNELS if cuda.why_not(name, cuda.Wanted(**wanted), capability) is None]

    assert best() == [cuda.VLLM_FLASH, cuda.FLASHINFER, cuda.FLEX]
    assert best(block_size=256) == list(cuda.KERNELS)
    assert best(head_size=80) == [cuda.VLLM_FLASH, cuda.FLEX]
    assert best((7, 5)) == [cuda.FLEX]
    assert best(dtype="float32", stored="float32") == [cuda.FLEX]
    assert best(stored="float8_e4m3fn") == best((6, 1)) == best(head_size=512, block_size=8) == []


def test_vllm_built_for_another_device_provides_no_flash_attention(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {"vllm": ModuleSpec("vllm", None, is_package=True)}
    found["vllm"].submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(cuda, "find_spec", found.get)
    wanted = cuda.Wanted("bfloat16", "bfloat16", 16, 128)
    assert cuda.why_not(cuda.VLLM_FLASH, wanted, (9, 0)) == "vllm is built for another device"
    (tmp_path / "vllm_flash_attn").mkdir()
    (tmp_path / "vllm_flash_attn" / "_vllm_fa2_C.abi3.so").touch()
    assert cuda.why_not(cuda.VLLM_FLASH, wanted, (9, 0)) is None
    assert cuda.why_not(cuda.FLASH, wanted, (9, 0)) == "flash_attn is not installed"


def test_attention_kernel_that_fails_the_self_check_is_skipped_and_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Try four kernels: one fails to load, one raises, one computes wrong values, the last is the reference."""
    LlamaForCausalLM(LlamaConfig(**TINY)).save_pretrained(tmp_path)
    runner = ModelRunner(
        make_plan(str(tmp_path), Deployment(dtype="float32", kv_cache_memory_bytes=1 << 20, max_model_len=128))
    )

    def missing() -> Any:
        raise ImportError("undefined symbol")

    def wrong(batch: Batch, *_: Any) -> Any:
        right = GatherAttention(batch, runner.pool, 4)
        return lambda *arguments: right(*arguments) * 1.5

    def breaks(_: Batch) -> Any:
        raise RuntimeError("no kernel image is available")

    reference = Candidate("gather", lambda: lambda batch: GatherAttention(batch, runner.pool, 4))
    runner._candidates = [
        Candidate("second", lambda: breaks), Candidate("third", missing), Candidate("fourth", lambda: wrong),
    ]  # fmt: skip
    runner._step = wrong
    runner.attention = "first"
    with pytest.raises(OtherLogits):
        checked_attention(runner)  # none of them is right
    assert [record.getMessage().split(" (")[0] for record in caplog.records] == [
        "attention: first failed the self-check",
        "attention: second failed the self-check",
        "attention: third does not load",
    ]
    runner._candidates = [reference]
    assert checked_attention(runner) < 1e-4
    assert runner.attention == "gather"
    assert "fourth failed the self-check ('llama' gives other logits" in caplog.messages[-1]
    assert caplog.messages[-1].endswith("allowed)); trying gather")


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_gemma2_passes_self_check_with_flex_attention(tmp_path: Path, eager: None) -> None:
    """Gemma 2 has windows in every other layer and capped scores; the self-check exceeds the step limit."""
    config = Gemma2Config(**TINY, head_dim=16, sliding_window=24, query_pre_attn_scalar=16)
    Gemma2ForCausalLM(config).save_pretrained(tmp_path)
    limits = {"max_model_len": 128, "max_num_seqs": 2, "max_num_batched_tokens": 16}
    plan = make_plan(str(tmp_path), Deployment(dtype="float32", kv_cache_memory_bytes=1 << 19, **limits))
    runner = ModelRunner(plan)
    buffers = Buffers(runner.pool, limits_of(plan))
    runner._step = lambda batch: FlexAttention(batch, runner.pool, buffers)
    assert self_check(runner) < 1e-5
    assert runner.forward(full_batch(runner)).isfinite().all()


def test_doctor_reports_attention_kernel_for_each_device(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu = {"device": "cuda:0", "name": "some GPU", "memory_bytes": 80 << 30, "compute_capability": (7, 5)}
    cpu = {"device": "cpu", "cores": 2, "memory_bytes": 1 << 30}
    monkeypatch.setattr(doctor, "devices", lambda: [cpu, gpu])
    monkeypatch.setattr(cuda, "_missing", lambda name: None)
    assert doctor.run([]) == 0
    said = capsys.readouterr().out
    assert re.search(r"cpu +in place, then gather\n +cuda:0 +FlexAttention, then gather\n", said)
    assert "not FlashAttention: needs compute capability 8.0, this is 7.5" in said


def test_gpu_framework_bytes_are_used_bytes_minus_weights_pool_and_activations() -> None:
    plan = make_plan("demo", Deployment(kv_cache_memory_bytes=64 << 20, max_model_len=128, max_num_seqs=4))
    figures = {"weights_bytes": 1000, "warm_weights_bytes": 1000, "kv_pool_bytes": 500, "activation_bytes": 70}
    ready = Ready(num_blocks=9, self_check_error=0.0, stats=HFScheduler(plan).stats(), **figures)
    assert ready.framework_bytes(resident=1600) == 100
    on_gpu = dataclasses.replace(ready, device_bytes=1900)
    assert on_gpu.framework_bytes(resident=123_456) == 1900 - 1000 - 500 - 70


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_gpu_plan_reserves_workspace_of_the_largest_attention_kernel(dtype: str) -> None:
    """With 512 tokens per step, SmolLM2's attention and FlashInfer's workspace need more bytes than its MLP."""
    limits = {"max_model_len": 2048, "max_num_seqs": 64, "max_num_batched_tokens": 512}
    cpu = make_plan("demo", Deployment(dtype="bfloat16", device_memory=8 << 30, **limits)).rank
    gpu = Deployment(engine="hf", device="cuda", dtype=dtype, device_memory=80 << 30, **limits)
    attention, mlp = 512 * 3 * (9 + 3) * 64 * 2, 512 * 3 * 1536 * 2
    wider = attention + FLASHINFER_WORKSPACE_BYTES - mlp
    assert make_plan("demo", gpu).rank.activation_bytes - cpu.activation_bytes == wider
