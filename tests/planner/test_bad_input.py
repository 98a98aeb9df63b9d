"""Tests that invalid configs, models and flags raise a planner error naming field and value."""

from __future__ import annotations

import contextlib
import json

import pytest

from tonnage.planner.deployment import Deployment
from tonnage.planner.errors import (
    CheckpointError,
    ConfigError,
    DeploymentError,
    ModelNotFound,
    TonnageError,
    UnsupportedArchitecture,
)
from tonnage.planner.planning.build import make_plan

FLAGS = Deployment(device_memory=1 << 34)


@pytest.mark.parametrize(
    ("change", "error", "field"),
    [
        ({"model_type": "brand_new"}, UnsupportedArchitecture, "model_type"),
        ({"model_type": None}, ConfigError, "model_type"),
        ({"model_type": ["llama"]}, ConfigError, "model_type"),
        ({"model_type": "gemma3"}, ConfigError, "text_config"),
        ({"architectures": ["LlamaForSequenceClassification"]}, UnsupportedArchitecture, "architectures"),
        ({"architectures": "LlamaForCausalLM"}, ConfigError, "architectures"),
        ({"hidden_size": None}, ConfigError, "hidden_size"),
        ({"hidden_size": "64"}, ConfigError, "hidden_size"),
        ({"hidden_size": 64.0}, ConfigError, "hidden_size"),
        ({"hidden_size": True}, ConfigError, "hidden_size"),
        ({"hidden_size": -64}, ConfigError, "hidden_size"),
        ({"hidden_size": 0}, ConfigError, "hidden_size"),
        ({"hidden_size": 66}, ConfigError, "hidden_size"),
        ({"hidden_size": 10**30}, ConfigError, "hidden_size"),
        ({"num_hidden_layers": 10**9}, ConfigError, "num_hidden_layers"),
        ({"num_hidden_layers": [2]}, ConfigError, "num_hidden_layers"),
        ({"num_attention_heads": 0}, ConfigError, "num_attention_heads"),
        ({"num_key_value_heads": 3}, ConfigError, "num_attention_heads"),
        ({"num_key_value_heads": 8}, ConfigError, "num_attention_heads"),
        ({"vocab_size": 2**40}, ConfigError, "vocab_size"),
        ({"tie_word_embeddings": "yes"}, ConfigError, "tie_word_embeddings"),
        ({"dtype": "float8"}, ConfigError, "dtype"),
        ({"rope_scaling": "linear"}, ConfigError, "rope_scaling"),
        ({"rope_scaling": {"type": "spiral"}}, UnsupportedArchitecture, "rope_scaling.rope_type"),
        ({"num_experts": 8}, UnsupportedArchitecture, "num_experts"),
        ({"kv_lora_rank": 512}, UnsupportedArchitecture, "kv_lora_rank"),
        ({"sliding_window": 4096}, UnsupportedArchitecture, "sliding_window"),
        ({"vision_config": {"hidden_size": 1}}, UnsupportedArchitecture, "vision_config"),
        ({"is_encoder_decoder": True}, UnsupportedArchitecture, "is_encoder_decoder"),
        ({"quantization_config": []}, ConfigError, "quantization_config"),
        ({"quantization_config": {}}, UnsupportedArchitecture, "quantization_config.quant_method"),
        (
            {"quantization_config": {"quant_method": "quip"}},
            UnsupportedArchitecture,
            "quantization_config.quant_method",
        ),
        ({"quantization_config": {"quant_method": "gptq", "bits": 5}}, ConfigError, "quantization_config.bits"),
        (
            {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 0}},
            ConfigError,
            "quantization_config.group_size",
        ),
        (
            {
                "quantization_config": {
                    "quant_method": "bitsandbytes",
                    "load_in_4bit": True,
                    "bnb_4bit_quant_type": "x",
                }
            },
            UnsupportedArchitecture,
            "quantization_config.bnb_4bit_quant_type",
        ),
        ({"model_type": "qwen2", "layer_types": ["full_attention"]}, ConfigError, "layer_types"),
        (
            {"model_type": "qwen2", "layer_types": ["full_attention", "x"]},
            UnsupportedArchitecture,
            "layer_types",
        ),
        ({"model_type": "qwen2", "layer_types": ["sliding_attention"] * 2}, ConfigError, "sliding_window"),
        ({"model_type": "gpt_neox", "rotary_pct": 1.5}, ConfigError, "rotary_pct"),
        ({"model_type": "gpt_bigcode", "n_embd": 32}, ConfigError, "hidden_size"),
        ({"model_type": "falcon", "num_ln_in_parallel_attn": 3}, ConfigError, "num_ln_in_parallel_attn"),
    ],
)
def test_error_for_an_invalid_config_field_names_the_field(change, error, field, tiny_llama, folder_with):
    config = {**tiny_llama, **change}
    if "model_type" in change:
        config.pop("architectures")
    with pytest.raises(error) as caught:
        make_plan(folder_with(config), FLAGS)
    assert caught.value.field == field
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff\xfe\x00", "not UTF-8"),
        (b"[1]", "must be a JSON object"),
        (b'{"hidden_size": 1, "hidden_size": 2}', "given twice"),
        (b'{"rope_theta": NaN}', "rope_theta: nan is not a finite number"),
        (b'{"a": {"b": [Infinity]}}', r"a.b\[0\]: inf"),
        (b'{"a":' * 60 + b"1" + b"}" * 60, "nested more than 32 deep"),
        (b"[" * 200_000, "nested too deeply"),
        (b'{"a": ' + b"9" * 5000 + b"}", "5000 digits|4300"),
    ],
)
def test_broken_config_json_is_rejected(data, match, folder_with):
    with pytest.raises(ConfigError, match=match):
        make_plan(folder_with(data), FLAGS)


def test_invalid_value_in_any_config_field_gives_a_plan_or_a_planner_error(config_of, folder_with):
    """Each field of four real configs, replaced by 13 kinds of garbage, gives a plan or a planner error."""
    garbage = [None, -1, 0, 2**70, 1.5, "x", "", [], {}, [1], {"a": 1}, True, False]
    for name in ("meta-llama/Llama-3.2-1B", "google/gemma-3-1b-it", "tiiuae/falcon-40b", "Qwen/Qwen2.5-0.5B"):
        config = config_of(name)
        for field in config:
            for value in garbage:
                folder = folder_with({**config, field: value})
                # a planner error or a plan; anything else fails the test
                with contextlib.suppress(TonnageError):
                    make_plan(folder, FLAGS)


def error_of(folder: str) -> ConfigError | None:
    try:
        make_plan(folder, FLAGS)
    except ConfigError as error:
        return error
    return None


def test_config_without_one_field_gives_a_plan_or_an_error_that_names_the_field(config_of, folder_with):
    for name in ("meta-llama/Llama-3.2-1B", "google/gemma-2-2b", "transformers-default/gpt_bigcode"):
        config = config_of(name)
        for field in config:
            error = error_of(folder_with({k: v for k, v in config.items() if k != field}))
            assert error is None or error.field == field


@pytest.mark.parametrize(
    ("model", "match"),
    [
        ("", "not the name of a model"),
        ("no such thing", "neither a folder"),
        ("x" * 5000, "name too long"),
        ("~no-such-user/model", "home directory"),
        ("/dev/null", "not a .gguf"),
        ("a\0b", "not the name of a model"),
        ("/nonexistent/path/model", "neither a folder"),
    ],
)
def test_unknown_model_name_raises_model_not_found(model, match):
    with pytest.raises(ModelNotFound, match=match) as caught:
        make_plan(model, FLAGS)
    assert caught.value.field == "model"


def test_uncached_hub_model_offline_error_names_hf_hub_offline(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelNotFound, match="HF_HUB_OFFLINE is set"):
        make_plan("org/name", FLAGS)


def test_model_in_the_local_hub_cache_is_found(monkeypatch, tmp_path, tiny_llama):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    snapshot = tmp_path / "models--org--name" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot.parent.parent / "refs").mkdir()
    (snapshot.parent.parent / "refs" / "main").write_text("abc")
    (snapshot / "config.json").write_text(json.dumps(tiny_llama))
    plan = make_plan("org/name", FLAGS)
    assert plan.model.id == "org/name"
    assert plan.model.path == "org/name"  # only the config is local; the engine fetches the rest


def test_path_without_a_model_is_rejected_with_the_reason(tmp_path):
    with pytest.raises(ModelNotFound, match=r"no config\.json"):
        make_plan(str(tmp_path), FLAGS)
    (tmp_path / "weights.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="pickle file: reading it runs code"):
        make_plan(str(tmp_path / "weights.bin"), FLAGS)
    (tmp_path / "weights.txt").write_bytes(b"x")
    with pytest.raises(ModelNotFound, match=r"not a \.gguf"):
        make_plan(str(tmp_path / "weights.txt"), FLAGS)
    (tmp_path / "m.gguf").write_bytes(b"not gguf at all, but long enough")
    with pytest.raises(CheckpointError, match="does not begin with GGUF"):
        make_plan(str(tmp_path / "m.gguf"), FLAGS)


def test_checkpoint_contradicting_its_config_is_rejected(tmp_path, tiny_llama):
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    fields = {k: v for k, v in tiny_llama.items() if k not in ("model_type", "architectures", "dtype")}
    AutoModelForCausalLM.from_config(LlamaConfig(**fields)).to(torch.float16).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    real = json.loads(path.read_text())
    assert make_plan(str(tmp_path), FLAGS).model.dtype == "float16"
    path.write_text(json.dumps({k: v for k, v in real.items() if k != "dtype"}))
    assert make_plan(str(tmp_path), FLAGS).model.dtype == "float16"  # the dtype of the headers
    path.write_text(json.dumps(real | {"intermediate_size": 100}))
    with pytest.raises(
        CheckpointError, match=r"gate_proj.weight is \[96, 64\] in the checkpoint but \[100, 64\]"
    ):
        make_plan(str(tmp_path), FLAGS)
    path.write_text(json.dumps(real | {"num_hidden_layers": 3}))
    with pytest.raises(CheckpointError, match=r"layers\.2\.self_attn\.q_proj\.weight is not in"):
        make_plan(str(tmp_path), FLAGS)


@pytest.mark.parametrize(
    ("flags", "field"),
    [
        ({"max_model_len": 257}, "--max-model-len"),
        ({"max_model_len": 0}, "--max-model-len"),
        ({"max_num_seqs": -1}, "--max-num-seqs"),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 32}, "--max-num-batched-tokens"),
        ({"block_size": 24}, "--block-size"),
        ({"block_size": 1 << 20}, "--block-size"),
        ({"engine": "vllm", "block_size": 16}, "--block-size"),
        ({"engine": "tgi"}, "--engine"),
        ({"device": "tpu"}, "--device"),
        ({"device": "cuda", "device_memory": None}, "--device-memory"),
        ({"device_memory": 0}, "--device-memory"),
        ({"gpu_memory_utilization": 1.5}, "--gpu-memory-utilization"),
        ({"gpu_memory_utilization": float("nan")}, "--gpu-memory-utilization"),
        ({"dtype": "int8"}, "--dtype"),
        ({"kv_cache_dtype": "int3"}, "--kv-cache-dtype"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "--kv-cache-dtype"),
        ({"quantization": "quip"}, "--quantization"),
        ({"kv_cache_memory_bytes": -5}, "--kv-cache-memory-bytes"),
    ],
)
def test_error_for_an_invalid_flag_value_names_the_flag(flags, field, tiny_llama, folder_with):
    with pytest.raises(DeploymentError) as caught:
        make_plan(folder_with(tiny_llama), Deployment(**{"device_memory": 1 << 34, **flags}))
    assert caught.value.field == field


def test_quantization_flag_contradicting_checkpoint_is_rejected(config_of):
    from tonnage.planner.quantization.read import read_quantization

    config = config_of("jeevanchaps/Llama-3.1-8B-Instruct-bnb")
    assert read_quantization(config, "int8").scheme == "int8"
    with pytest.raises(DeploymentError, match="nf4 contradicts the checkpoint"):
        read_quantization(config, "nf4")


def test_quantization_of_a_tied_lm_head_is_rejected(tiny_llama, folder_with):
    stored = {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_skip_modules": ["embed_tokens"]}
    folder = folder_with(tiny_llama | {"tie_word_embeddings": True, "quantization_config": stored})
    with pytest.raises(UnsupportedArchitecture) as caught:
        make_plan(folder, FLAGS)
    assert caught.value.field == "quantization_config.llm_int8_skip_modules"


def test_rope_scaling_extends_the_maximum_length_by_vllms_rule(tiny_llama, folder_with):
    for kind, length in (("linear", 1024), ("dynamic", 1024), ("yarn", 256), ("llama3", 256)):
        scaling = {"rope_scaling": {"rope_type": kind, "factor": 4.0}}
        assert make_plan(folder_with(tiny_llama | scaling), FLAGS).model.max_model_len == length
    with pytest.raises(ConfigError, match=r"rope_scaling\.factor"):
        make_plan(folder_with(tiny_llama | {"rope_scaling": {"type": "linear", "factor": 0}}), FLAGS)


def test_checkpoint_with_a_copy_of_the_tied_lm_head_widens_the_interval_of_weight_bytes(
    tmp_path, tiny_llama, held_bytes
):
    """Transformers keeps a stored lm_head separately if its values differ, which the header does not tell."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM, LlamaConfig

    fields = {k: v for k, v in tiny_llama.items() if k not in ("model_type", "architectures", "dtype")}
    config = LlamaConfig(**fields, tie_word_embeddings=True)
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(tmp_path)
    alone = make_plan(str(tmp_path), FLAGS)
    assert "weights_bytes" not in alone.intervals
    path = tmp_path / "model.safetensors"
    for value in (None, 1.0):
        tensors = load_file(path)
        copy = tensors["model.embed_tokens.weight"].clone()
        tensors["lm_head.weight"] = copy if value is None else torch.full_like(copy, value)
        save_file(tensors, path, metadata={"format": "pt"})
        low, high = make_plan(str(tmp_path), FLAGS).intervals["weights_bytes"]
        held = held_bytes(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16))
        assert held == (low if value is None else high)
