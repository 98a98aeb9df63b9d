"""The bfloat16 CPU kernels against a reference in plain torch; accuracy is measured against float64."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from tonnage.planner.model.layout import KVGroup, KVLayout
from tonnage.server.engines.hf.attention.gather import GatherAttention
from tonnage.server.engines.hf.attention.in_place import InPlaceAttention, Scratch, serves
from tonnage.server.engines.hf.attention.interface import NAME, PagedBatch, register
from tonnage.server.engines.hf.batch import Batch
from tonnage.server.engines.hf.kernels import linear, small
from tonnage.server.engines.hf.kernels.attention import cut
from tonnage.server.engines.hf.model.fuse import fuse
from tonnage.server.engines.hf.model.layers import fuse_layers
from tonnage.server.engines.hf.pool import PagedPool

pytestmark = pytest.mark.usefixtures("two_threads")

# (context after the step, queries of the step): decodes, whole prompts, chunks, chunks longer than the rows of
# one walk (32), contexts at and around block borders.
LENGTHS = [(1, 1), (16, 1), (33, 1), (129, 1), (5, 5), (40, 40), (100, 37), (130, 64), (128, 128)]
# A rounding to bfloat16 is at most 2^-9 of the value; sums are float32, so one rounding is all there is.
ROUNDING = 2**-8


def layout_of(block_size: int, kv_heads: int, head_size: int, window: int | None) -> KVLayout:
    group = KVGroup("full" if window is None else "sliding", (0, 1), window)
    return KVLayout((group,), block_size, 2, kv_heads, head_size, "bfloat16", 2)


def filled(layout: KVLayout, seed: int) -> tuple[PagedPool, Batch, list[torch.Tensor]]:
    """Return a pool with the contexts of LENGTHS, the next step's batch, and the contexts after it.

    The contexts are in scattered blocks; every other value of the pool is NaN. The returned contexts have the
    shape [2 (K, V), length, KV heads, head size].
    """
    rng = np.random.default_rng(seed)
    size = layout.block_size
    needed = [-(-length // size) for length, _ in LENGTHS]
    pool = PagedPool(layout, sum(needed) + 1, torch.device("cpu"))
    pool.tensor.fill_(float("nan"))
    free = rng.permutation(np.arange(1, sum(needed) + 1)).tolist()
    table = np.zeros((len(LENGTHS), max(needed)), np.int32)
    contexts, slots, positions = [], [], []
    generator = torch.Generator().manual_seed(seed)
    for i, (length, queries) in enumerate(LENGTHS):
        table[i, : needed[i]] = [free.pop() for _ in range(needed[i])]
        context = torch.randn(2, length, layout.kv_heads, layout.head_size, generator=generator).bfloat16()
        contexts.append(context)
        position = np.arange(length)
        slot = table[i, position // size].astype(np.int64) * size + position % size
        for layer, part in itertools.product(range(2), range(2)):
            old = slot[: length - queries]
            pool.tensor[old // size, layer, part, old % size] = context[part, : length - queries]
        slots.append(slot[length - queries :])
        positions.append(position[length - queries :])
    queries = np.array([q for _, q in LENGTHS])
    batch = Batch(
        token_ids=np.zeros(queries.sum(), np.int64),
        positions=np.concatenate(positions),
        query_start=np.concatenate(([0], queries.cumsum())),
        kv_len=np.array([length for length, _ in LENGTHS], np.int64),
        slots=(np.concatenate(slots),),
        tables=(table,),
        logits_at=np.zeros(0, np.int64),
    )
    return pool, batch, contexts


def exact(
    query: torch.Tensor,
    context: torch.Tensor,
    first: int,
    window: int | None,
    scaling: float,
    softcap: float | None,
) -> torch.Tensor:
    """Return the float64 attention of queries [Q, heads, size] on keys and values [2, S, KV heads, size]."""
    group = query.shape[1] // context.shape[2]
    key, value = (part.double().repeat_interleave(group, 1) for part in context)
    scores = torch.einsum("qhd,shd->hqs", query.double(), key) * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    at, see = torch.arange(first, first + len(query))[:, None], torch.arange(len(key))[None]
    hidden = see > at if window is None else (see > at) | (see <= at - window)
    return torch.einsum("hqs,shd->qhd", scores.masked_fill(hidden, -math.inf).softmax(-1), value)


# Every head size, GQA ratio, window and block size of the list at least once, none of them in one company only.
CASES = [
    # head size, KV heads, ratio, window, block size, softcap, threads
    (64, 3, 3, None, 16, None, 2),
    (64, 1, 1, 24, 32, None, 1),
    (64, 2, 8, 7, 128, 30.0, 2),
    (80, 2, 1, None, 64, None, 1),
    (80, 1, 5, 40, 16, None, 2),
    (128, 1, 71, None, 16, None, 2),
    (128, 2, 4, 100, 64, 50.0, 1),
    (128, 1, 33, 16, 128, None, 2),
    (256, 1, 4, 64, 16, None, 1),
    (256, 2, 2, None, 128, None, 2),
]


@pytest.mark.parametrize(("size", "kv_heads", "ratio", "window", "block_size", "softcap", "threads"), CASES)
def test_output_of_the_in_place_attention_kernel_equals_the_reference(
    size: int,
    kv_heads: int,
    ratio: int,
    window: int | None,
    block_size: int,
    softcap: float | None,
    threads: int,
) -> None:
    layout = layout_of(block_size, kv_heads, size, window)
    pool, batch, contexts = filled(layout, seed=size + ratio)
    assert serves(pool)
    starts, scaling = batch.query_start, 1.3 * size**-0.5
    query = torch.randn(int(starts[-1]), kv_heads * ratio, size).bfloat16()
    key, value = (
        torch.cat(
            [context[part, len(context[part]) - q :] for context, (_, q) in zip(contexts, LENGTHS, strict=True)]
        )
        for part in range(2)
    )
    other = PagedPool(layout, pool.tensor.shape[0], torch.device("cpu"))
    other.tensor.copy_(pool.tensor)
    attention = InPlaceAttention(batch, pool, query.shape[1], Scratch(pool, threads))
    found = attention(0, 1, query, key, value, scaling, softcap).double()
    gathered = GatherAttention(batch, other, query.shape[1])(0, 1, query, key, value, scaling, softcap).double()
    # Both have written the same K and V to the same slots, and nothing else.
    assert torch.equal(pool.tensor.view(torch.int16), other.tensor.view(torch.int16))
    for i, (length, queries) in enumerate(LENGTHS):
        mine = slice(int(starts[i]), int(starts[i + 1]))
        want = exact(query[mine], contexts[i], length - queries, window, scaling, softcap)
        assert float((found[mine] - want).norm() / want.norm()) < ROUNDING
        # The reference rounds scores to bfloat16 where they are capped, as transformers' eager attention does.
        assert float((gathered[mine] - want).norm() / want.norm()) < 4 * ROUNDING


def test_attention_output_of_a_token_is_independent_of_batch_and_prompt_chunks() -> None:
    """Chunks, decodes and batches of any composition must give equal bits."""
    layout = layout_of(16, 2, 64, None)
    pool, batch, contexts = filled(layout, seed=1)
    query = torch.randn(int(batch.query_start[-1]), 6, 64).bfloat16()
    whole = LENGTHS.index((128, 128))
    rows = slice(int(batch.query_start[whole]), int(batch.query_start[whole + 1]))
    key, value = (
        torch.cat(
            [context[part, len(context[part]) - q :] for context, (_, q) in zip(contexts, LENGTHS, strict=True)]
        )
        for part in range(2)
    )
    scratch = Scratch(pool, 2)
    together = InPlaceAttention(batch, pool, 6, scratch)(0, 0, query, key, value, 0.125, None)[rows]
    for first, last in ((0, 1), (1, 50), (50, 127), (127, 128)):
        part = slice(rows.start + first, rows.start + last)
        alone = Batch(
            token_ids=batch.token_ids[part],
            positions=batch.positions[part],
            query_start=np.array([0, last - first]),
            kv_len=np.array([last]),
            slots=(batch.slots[0][part],),
            tables=(batch.tables[0][whole : whole + 1],),
            logits_at=batch.logits_at,
        )
        found = InPlaceAttention(alone, pool, 6, scratch)(
            0, 0, query[part], key[part], value[part], 0.125, None
        )
        assert torch.equal(found, together[first:last])


def test_attention_work_is_split_evenly_among_threads_without_overlap() -> None:
    queries, kv_len = np.array([1, 1, 300, 1, 64]), np.array([700, 3, 300, 90, 500])
    items, shares = cut(np.concatenate(([0], queries.cumsum())), kv_len, 3, 2, threads=4)
    assert shares[0] == 0
    assert shares[-1] == len(items)
    assert (np.diff(shares) >= 0).all()
    covered = sorted((int(flat + i), int(head)) for _, flat, count, _, head in items for i in range(count))
    assert covered == [(flat, head) for flat in range(queries.sum()) for head in range(3)]
    cost = [(items[a:b, 2] * (items[a:b, 3] + items[a:b, 2])).sum() for a, b in itertools.pairwise(shares)]
    assert max(cost) < 0.5 * sum(cost)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 6, 7, 9, 16, 21, 70, 199])
@pytest.mark.parametrize(("k", "columns"), [(576, 192), (64, 16), (80, 48), (1000, 32), (33, 16)])
def test_linear_kernel_equals_the_float64_reference(rows: int, k: int, columns: int) -> None:
    torch.manual_seed(rows)
    x, weight, bias = torch.randn(rows, k), torch.randn(columns, k), torch.randn(columns)
    x, weight, bias = x.bfloat16(), weight.bfloat16(), bias.bfloat16()
    assert linear.serves(weight)
    want = x.double() @ weight.double().T
    found = linear.linear(x, weight)
    assert float((found.double() - want).norm() / want.norm()) < ROUNDING
    assert torch.equal(linear.linear(x, weight, bias), found + bias)
    assert torch.equal(linear.linear(x[rows // 2 :], weight), found[rows // 2 :])  # bit for bit
    gate = (torch.randn(columns, k) / k**0.5).bfloat16()
    for name, act in (("silu", F.silu), ("gelu_tanh", lambda v: F.gelu(v, approximate="tanh"))):
        from tonnage.server.engines.hf.model.fuse import ACTIVATIONS

        product = act(x.double() @ gate.double().T) * want
        both = linear.gated(x, gate, weight, ACTIVATIONS[name])
        assert float((both.double() - product).norm() / product.norm()) < 3 * ROUNDING


def test_linear_kernel_is_not_used_for_unsupported_weights() -> None:
    assert not linear.serves(torch.zeros(17, 64, dtype=torch.bfloat16))
    assert not linear.serves(torch.zeros(16, 64))
    assert not linear.serves(torch.zeros(64, 32, dtype=torch.bfloat16).T)


@pytest.mark.parametrize("rows", [1, 5, 300])
def test_rms_norm_and_rotary_kernels_equal_the_reference(rows: int) -> None:
    torch.manual_seed(0)
    x = (torch.randn(rows, 576) * 30).bfloat16()
    for module, shift in ((LlamaRMSNorm(576, 1e-5), 0.0), (Gemma3RMSNorm(576, 1e-6), 1.0)):
        module = module.bfloat16().requires_grad_(False)
        module.weight.data.normal_(1.0, 0.2)
        want = module.double()(x.double()) if shift else module(x.float())
        eps = getattr(module, "variance_epsilon", None) or module.eps
        found = small.rms_norm(x, module.weight.bfloat16(), eps, shift)
        assert float((found.double() - want.double()).norm() / want.double().norm()) < 2 * ROUNDING
    heads = torch.randn(rows, 4, 64).bfloat16()
    cosine, sine = (torch.randn(rows, 64).bfloat16() for _ in range(2))
    wide = heads.double().transpose(0, 1)[None]
    want, _ = apply_rotary_pos_emb(wide, wide, cosine.double()[None], sine.double()[None])
    small.rotate(heads, cosine, sine)
    assert float((heads.double() - want[0].transpose(0, 1)).norm() / want.norm()) < ROUNDING


def test_cpu_kernels_propagate_nan() -> None:
    x = torch.ones(3, 64).bfloat16()
    x[1, 5] = float("nan")
    weight = torch.ones(16, 64).bfloat16()
    for found in (linear.linear(x, weight), linear.gated(x, weight, weight, (1.0, 0.0))):
        assert found.isnan().all(dim=1).tolist() == [False, True, False]
    assert small.rms_norm(x, weight[0], 1e-5, 0.0).isnan().any(dim=1).tolist() == [False, True, False]


def tiny(family: str) -> torch.nn.Module:
    """Return a random bfloat16 model of a family with two layers and non-trivial norms and biases."""
    common = dict(  # noqa: C408
        vocab_size=256, hidden_size=576, intermediate_size=208, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=512, attn_implementation=NAME,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    if family.startswith("gemma"):
        common |= {"layer_types": ["sliding_attention"] * 2, "sliding_window": 24}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **common)).bfloat16().eval()
    for parameter in model.requires_grad_(False).parameters():
        if parameter.ndim == 1:
            parameter.normal_(1.0, 0.2)
        else:
            parameter.mul_(5)
    return model


# Beside the plain shape: biases, norms of heads, four norms with 1 + weight and GELU, capped scores.
@pytest.mark.parametrize(
    ("family", "threads"),
    [("llama", 1), ("llama", 2), ("qwen2", 2), ("qwen3", 1), ("gemma2", 2), ("gemma3_text", 2)],
)
def test_fused_decoder_layer_equals_its_separate_modules_bit_for_bit(family: str, threads: int) -> None:
    register()
    model = tiny(family)
    layout = layout_of(16, 2, 32, 24 if family.startswith("gemma") else None)
    pool, batch, _ = filled(layout, seed=3)
    other = PagedPool(layout, pool.tensor.shape[0], torch.device("cpu"))
    other.tensor.copy_(pool.tensor)
    fuse(model)
    assert fuse_layers(model, layout, 6, threads) == 2

    def answer(pool: PagedPool) -> torch.Tensor:
        scratch = Scratch(pool, threads)
        return model(
            input_ids=torch.arange(len(batch.positions))[None] % 256,
            position_ids=torch.from_numpy(batch.positions)[None],
            use_cache=False,
            paged_batch=PagedBatch(InPlaceAttention(batch, pool, 6, scratch), pool),
        ).logits

    found = answer(pool)
    for layer in model.model.layers:
        del layer.forward
    want = answer(other)
    assert torch.isfinite(want).all()
    assert torch.equal(found, want)
    assert torch.equal(pool.tensor.view(torch.int16), other.tensor.view(torch.int16))


@pytest.mark.parametrize(
    ("family", "why"),
    [
        ("granite", "a factor on what is added"),
        ("olmo2", "no norm before"),
        ("smollm3", "layers without angles"),
    ],
)
def test_decoder_layer_with_unsupported_operations_is_not_fused(family: str, why: str) -> None:
    register()
    model = tiny(family)
    if family == "granite":
        for layer in model.model.layers:
            layer.residual_multiplier = 0.22
    if family == "smollm3":
        for layer in model.model.layers:
            layer.self_attn.use_rope = False
    assert fuse(model)["gated mlp"] == 2
    assert fuse_layers(model, layout_of(16, 2, 32, None), 6, 1) == 0, why
    assert not any("forward" in layer.__dict__ for layer in model.model.layers)
