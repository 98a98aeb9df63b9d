"""Tests with tiny real models of every family: storages after from_pretrained, DynamicCache, random configs."""

from __future__ import annotations

import random

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, DynamicCache

from tonnage.planner.deployment import Deployment
from tonnage.planner.errors import DeploymentError
from tonnage.planner.families.registry import build_architecture
from tonnage.planner.planning.build import make_plan

SHAPE = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip
FALCON = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
CODE = {"vocab_size": 128, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 64}
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 128,
}  # fmt: skip

# name -> (config class, fields)
MODELS = {
    "llama": ("LlamaConfig", {**SHAPE, "attention_bias": True, "mlp_bias": True}),
    "llama_tied": (
        "LlamaConfig",
        {**SHAPE, "tie_word_embeddings": True, "head_dim": 24, "rope_parameters": LLAMA3_ROPE},
    ),
    "mistral": ("MistralConfig", {**SHAPE, "sliding_window": 8}),
    "qwen2": (
        "Qwen2Config",
        {**SHAPE, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
    ),
    "qwen3": ("Qwen3Config", {**SHAPE, "head_dim": 32}),
    "gemma": ("GemmaConfig", {**SHAPE, "head_dim": 16}),
    "gemma2": ("Gemma2Config", {**SHAPE, "head_dim": 16, "sliding_window": 8}),
    "gemma3": ("Gemma3TextConfig", {**SHAPE, "num_hidden_layers": 7, "head_dim": 16, "sliding_window": 8}),
    "gpt_neox": ("GPTNeoXConfig", {k: v for k, v in SHAPE.items() if k != "num_key_value_heads"}),
    "falcon_mqa": ("FalconConfig", {**FALCON, "multi_query": True}),
    "falcon_new": (
        "FalconConfig",
        {**FALCON, "num_kv_heads": 2, "new_decoder_architecture": True, "bias": True},
    ),
    "falcon_mha": (
        "FalconConfig",
        {**FALCON, "multi_query": False, "alibi": True, "parallel_attn": False, "bias": True},
    ),
    "bigcode": ("GPTBigCodeConfig", CODE),
    "bigcode_mha": ("GPTBigCodeConfig", {**CODE, "multi_query": False, "tie_word_embeddings": False}),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return a function that saves a random bfloat16 model of a family once and returns its folder."""
    made = {}

    def make(name: str) -> str:
        if name not in made:
            kind, fields = MODELS[name]
            folder = tmp_path_factory.mktemp(name)
            model = AutoModelForCausalLM.from_config(getattr(transformers, kind)(**fields))
            model.to(torch.bfloat16).save_pretrained(folder)
            made[name] = str(folder)
        return made[name]

    return make


def loaded(folder: str, dtype: torch.dtype, scheme: str | None):
    options = {}
    if scheme == "int8":
        options["quantization_config"] = BitsAndBytesConfig(load_in_8bit=True)
    elif scheme is not None:
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=scheme == "nf4-double",
            bnb_4bit_compute_dtype=dtype,
        )
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options)


@pytest.mark.parametrize("scheme", [None, "int8", "nf4", "nf4-double"])
@pytest.mark.parametrize("name", MODELS)
def test_planned_weight_bytes_equal_loaded_model(name, scheme, saved, held_bytes):
    model = loaded(saved(name), torch.bfloat16, scheme)
    if scheme is not None and name.startswith("falcon"):
        # bitsandbytes replaces no layer of Falcon, so that the plan is rejected
        unquantized = make_plan(saved(name), Deployment(device_memory=1 << 34)).rank.weights_bytes
        assert held_bytes(model) == unquantized
        with pytest.raises(DeploymentError, match="replaces no module of FalconForCausalLM"):
            make_plan(saved(name), Deployment(quantization=scheme, device_memory=1 << 34))
        return
    plan = make_plan(saved(name), Deployment(quantization=scheme, device_memory=1 << 34))
    assert plan.model.via == "headers"
    assert held_bytes(model) == plan.rank.weights_bytes
    assert sum(t.value for t in plan.terms if t.name.startswith("weights.")) == plan.rank.weights_bytes
    if scheme is None:
        assert model.num_parameters() == plan.model.parameters


@pytest.mark.parametrize("name", MODELS)
def test_planned_float32_weight_bytes_equal_loaded_model(name, saved, held_bytes):
    plan = make_plan(saved(name), Deployment(dtype="float32", device_memory=1 << 34))
    assert held_bytes(loaded(saved(name), torch.float32, None)) == plan.rank.weights_bytes


@pytest.mark.parametrize("name", MODELS)
def test_planned_kv_cache_equals_transformers_dynamic_cache(name, saved):
    """Compare the bytes per token and the sliding layers with a plain DynamicCache."""
    tokens = 7  # the windows are 8: nothing has slid out yet
    model = loaded(saved(name), torch.bfloat16, None)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.arange(tokens)[None], past_key_values=cache, use_cache=True)
    held = sum(t.untyped_storage().nbytes() for layer in cache.layers for t in (layer.keys, layer.values))
    layout = make_plan(saved(name), Deployment(device_memory=1 << 34)).kv_cache.layout
    per_layer = layout.bytes_per_block // layout.block_size // layout.layer_slots
    assert held == tokens * per_layer * sum(len(group.layers) for group in layout.groups)
    sliding = {layer for group in layout.groups if group.kind == "sliding" for layer in group.layers}
    assert sliding == {i for i, layer in enumerate(cache.layers) if layer.is_sliding}
    windows = {group.window for group in layout.groups if group.kind == "sliding"}
    assert windows <= {8}


def mutations(rng: random.Random):
    """Yield random shapes for each family, as config-class arguments."""
    heads = rng.choice([1, 2, 4, 8])
    kv_heads = rng.choice([k for k in (1, 2, 4, 8) if heads % k == 0])
    hidden = heads * 2 * rng.randint(2, 12)
    base = {
        "vocab_size": rng.randint(10, 300), "hidden_size": hidden, "intermediate_size": rng.randint(8, 200),
        "num_hidden_layers": rng.randint(1, 9), "num_attention_heads": heads, "max_position_embeddings": 64,
        "tie_word_embeddings": rng.random() < 0.5,
    }  # fmt: skip
    grouped = {**base, "num_key_value_heads": kv_heads}
    head_dim = 2 * rng.randint(2, 20)
    bias = rng.random() < 0.5
    falcon = {k: base[k] for k in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")}
    falcon |= {"bias": bias, "alibi": rng.random() < 0.5, "ffn_hidden_size": base["intermediate_size"]}
    yield (
        "LlamaConfig",
        {**grouped, "head_dim": head_dim, "attention_bias": bias, "mlp_bias": rng.random() < 0.5},
    )
    yield "MistralConfig", {**grouped, "head_dim": rng.choice([None, head_dim])}
    yield "Qwen2Config", grouped
    yield "Qwen3Config", {**grouped, "head_dim": head_dim, "attention_bias": bias}
    for gemma in ("GemmaConfig", "Gemma2Config", "Gemma3TextConfig"):
        yield gemma, {**grouped, "head_dim": head_dim, "attention_bias": bias}
    yield "GPTNeoXConfig", {**base, "attention_bias": bias}
    yield "FalconConfig", {**falcon, "new_decoder_architecture": True, "num_kv_heads": kv_heads}
    yield "FalconConfig", {**falcon, "new_decoder_architecture": True, "num_ln_in_parallel_attn": 1}
    yield "FalconConfig", {**falcon, "multi_query": True, "num_kv_heads": kv_heads}
    yield "FalconConfig", {**falcon, "multi_query": False, "parallel_attn": rng.random() < 0.5}
    code = {
        "vocab_size": base["vocab_size"],
        "n_embd": hidden,
        "n_head": heads,
        "n_layer": base["num_hidden_layers"],
    }
    code |= {"n_positions": 32, "n_inner": rng.choice([None, 50]), "multi_query": rng.random() < 0.5}
    yield "GPTBigCodeConfig", {**code, "tie_word_embeddings": base["tie_word_embeddings"]}


@pytest.mark.parametrize("seed", range(8))
def test_planned_tensors_of_random_configs_equal_transformers_modules(seed):
    """Names and shapes of every parameter and buffer are equal."""
    rng = random.Random(seed)
    for kind, fields in mutations(rng):
        config = getattr(transformers, kind)(**fields)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        architecture = build_architecture(config.to_dict() | {"model_type": config.model_type})
        planned = {t.name: t.shape for t in architecture.tensors}
        real = {n: tuple(t.shape) for n, t in model.named_parameters(remove_duplicate=False)}
        real |= {n: tuple(t.shape) for n, t in model.named_buffers(remove_duplicate=False)}
        assert planned == real, (kind, fields)
        assert architecture.parameters == sum(p.numel() for p in model.parameters()), (kind, fields)
