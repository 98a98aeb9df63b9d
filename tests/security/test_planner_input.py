"""Hostile model files: the planner plans them or rejects them by name, within bounded time and memory.

``python tests/helpers/mutated_models.py`` does the same with 100,000 random files.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import mutated_models
import pytest

from tonnage.planner.api import plan_or_advise
from tonnage.planner.command import run
from tonnage.planner.deployment import Deployment
from tonnage.planner.engines.registry import engine_of
from tonnage.planner.errors import LONGEST_TEXT, CheckpointError, ConfigError, TonnageError
from tonnage.planner.headers import safetensors
from tonnage.planner.headers.gguf import read_gguf
from tonnage.planner.headers.index import MAX_TENSORS_OF_MODEL, read_folder
from tonnage.planner.headers.names import HubModel
from tonnage.planner.headers.remote import Remote
from tonnage.planner.headers.safetensors import MAX_TENSORS, read_header
from tonnage.planner.model import fields
from tonnage.planner.model.fields import LIMITS, MAX_CONFIG_BYTES, parse_config
from tonnage.planner.planning import size as sizing
from tonnage.planner.planning.build import make_plan, plan_source
from tonnage.planner.source.resolve import ModelSource

CONFIGS = Path(__file__).parent.parent / "data" / "configs"
FLAGS = Deployment(device_memory=1 << 36)
HUGE = 10**400  # JSON has no largest integer, a float has


def config_of(name: str) -> dict[str, Any]:
    return json.loads((CONFIGS / f"{name}.json").read_text())


def planned(config: dict[str, Any], flags: Deployment = FLAGS):
    return plan_source(ModelSource("m", "m", config, "folder"), flags)


def changed(name: str, path: str, value: Any) -> dict[str, Any]:
    config = config_of(name)
    *inner, last = path.split(".")
    place = config
    for key in inner:
        place = place[int(key) if isinstance(place, list) else key]
    place[int(last) if isinstance(place, list) else last] = value
    return config


TINY = mutated_models.TINY


@pytest.mark.parametrize(
    ("name", "path", "value", "field"),
    [
        ("transformers-default__xlstm", "qk_dim_factor", HUGE, "qk_dim_factor"),
        ("transformers-default__xlstm", "v_dim_factor", 1e308, "v_dim_factor"),
        ("transformers-default__xlstm", "qk_dim_factor", -0.5, "qk_dim_factor"),
        ("01-ai__Yi-1.5-6B-Chat", "rope_parameters", {"partial_rotary_factor": HUGE}, "partial_rotary_factor"),
        ("transformers-default__zamba", "layers_block_type.0", [], "layers_block_type"),
        ("transformers-default__recurrent_gemma", "block_types", [["attention"]], "block_types"),
        ("transformers-default__gpt_neo", "attention_types", [[[["global"]], 24]], "attention_types"),
        ("meta-llama__Llama-4-Scout-17B-16E-Instruct", "text_config.layer_types", [[]] * 48, "layer_types"),
        ("transformers-default__bart", "architectures", [["BartModel"]], "architectures"),
        ("nvidia__Llama-3_3-Nemotron-Super-49B-v1", "block_configs.3.attention", [1], "[3].attention"),
        (
            "meta-llama__Llama-3.2-11B-Vision-Instruct", "vision_config.num_global_layers", 1 << 22,
            "num_global_layers",
        ),
        ("transformers-default__musicgen_decoder", "num_codebooks", 1 << 22, "embed_tokens"),
        (
            "poolside__Laguna-XS.2-FP8", "rope_parameters.full_attention.partial_rotary_factor", 1e308,
            "partial_rotary_factor",
        ),
    ],
)  # fmt: skip
def test_error_for_a_config_field_of_the_wrong_type_names_the_field(name, path, value, field):
    with pytest.raises(TonnageError) as caught:
        planned(changed(name, path, value))
    assert field in str(caught.value)


def test_config_with_a_head_size_of_zero_is_rejected():
    config = changed("THUDM__chatglm3-6b", "num_attention_heads", 8192) | {"kv_channels": None}
    with pytest.raises(ConfigError, match=r"weight: the config gives it the shape \[0, 4096\]"):
        planned(config | {"multi_query_group_num": 8192})


def test_config_with_layer_types_that_are_no_strings_is_rejected():
    config = config_of("nvidia__NVIDIA-Nemotron-3-Nano-30B-A3B-BF16")
    config.pop("hybrid_override_pattern")
    with pytest.raises(ConfigError, match="layers_block_type"):
        planned(config | {"layers_block_type": [["mamba"]]})


def test_value_beyond_float_range_in_an_unused_dropout_field_is_ignored():
    planned(TINY | {"attention_dropout": HUGE})


@pytest.mark.parametrize(
    ("stored", "field"),
    [
        ({"quant_method": "modelopt", "quantized_layers": {"a": {"quant_algo": []}}}, "quantized_layers.a"),
        ({"quant_method": "torchao", "quant_type": {"default": {"_type": "Int4WeightOnlyConfig", "_data": []}}},
         "quant_type"),
        ({"quant_method": "torchao", "quant_type": "int4_weight_only",
          "quant_type_kwargs": {"group_size": "x"}}, "group_size"),
        ({"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 4, "group_size": -1}}},
         "group_size"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"a": {"weights": {
            "num_bits": 4, "strategy": "group", "group_size": [128]}}}}, "group_size"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"a": {"weights": {
            "num_bits": 4.0, "strategy": "channel"}}}}, "num_bits"),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {
            "num_bits": 8, "strategy": "block", "block_structure": [0, 0]}}}}, "strategy"),
    ],
    ids=lambda value: None if isinstance(value, dict) else value,
)  # fmt: skip
def test_error_for_a_broken_quantization_config_names_it(stored, field):
    with pytest.raises(TonnageError) as caught:
        planned(TINY | {"quantization_config": stored})
    assert field in str(caught.value)


def test_config_with_a_list_of_a_million_layers_is_read_in_linear_time():
    class Million(list):
        def __contains__(self, item: object) -> bool:
            pytest.fail("it is looked through for each layer")

    config = config_of("meta-llama__Llama-4-Scout-17B-16E-Instruct")
    text = config["text_config"]
    few, many = (config | {"text_config": text | {"moe_layers": Million([1] * n)}} for n in (1, 1_000_000))
    flags = Deployment(engine="vllm", gpu="h100-80g")
    assert planned(many, flags).ranks == planned(few, flags).ranks


def test_long_json_keys_are_parsed_in_linear_time(monkeypatch):
    monkeypatch.setattr(fields, "_written", lambda path: pytest.fail("the way to an item is written out"))
    key = "k" * (1 << 20)
    assert len(parse_config(json.dumps({key: [0.5] * 200_000}).encode(), "config.json")[key]) == 200_000


def test_config_file_above_the_size_limit_is_not_read(tmp_path):
    (tmp_path / "config.json").write_bytes(b" " * (MAX_CONFIG_BYTES + 1))
    with pytest.raises(ConfigError, match="is too large for a config"):
        make_plan(str(tmp_path), FLAGS)


@pytest.mark.timeout(60)  # a pipe would be waited for
@pytest.mark.parametrize("kind", ["pipe", "device"])
@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
def test_device_files_and_pipes_are_not_read_as_a_model(kind, name, tmp_path):
    if kind == "pipe":
        os.mkfifo(tmp_path / name)
    else:
        (tmp_path / name).symlink_to("/dev/zero")
    with pytest.raises(CheckpointError, match=f"{name}: is not a regular file"):
        read_folder(tmp_path)


def test_checkpoint_header_with_too_many_tensors_is_rejected_before_parsing(tmp_path, monkeypatch):
    entry = b'"%d":{"dtype":"U8","shape":[],"data_offsets":[0,1]},'
    text = b"{" + b"".join(entry % i for i in range(MAX_TENSORS + 1))[:-1] + b"}"
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    monkeypatch.setattr(safetensors.json, "loads", lambda text: pytest.fail("is parsed"))
    with pytest.raises(CheckpointError, match="describes 131,073 tensors"):
        read_header(path)


def test_checkpoint_index_with_too_many_tensors_is_rejected(tmp_path):
    names = {str(i): "a.safetensors" for i in range(MAX_TENSORS_OF_MODEL + 1)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    with pytest.raises(CheckpointError, match="names 524,289 tensors"):
        read_folder(tmp_path)


def test_tensor_shape_beyond_float_range_is_rejected(tmp_path):
    header = {"a": {"dtype": "F32", "shape": [1 << 62] * 64, "data_offsets": [0, 4]}}
    path = tmp_path / "model.safetensors"
    path.write_bytes(mutated_models.packed(header) + bytes(4))
    with pytest.raises(CheckpointError, match="a: F32"):
        read_header(path)


@pytest.mark.timeout(60)
def test_endless_gguf_header_is_rejected(tmp_path):
    """Ten gigabytes of empty strings, none of which is stored."""
    path = tmp_path / "model.gguf"
    start = b"GGUF" + (3).to_bytes(4, "little") + (0).to_bytes(8, "little") + (1).to_bytes(8, "little")
    entry = (1).to_bytes(8, "little") + b"a" + (9).to_bytes(4, "little") + (8).to_bytes(4, "little")
    path.write_bytes(start + entry + (10**9).to_bytes(8, "little"))
    os.truncate(path, 10 << 30)
    with pytest.raises(CheckpointError, match="inside an array"):
        read_gguf(path)


NASTY = "\x1b[2J\x1b]0;owned\x07\nred\u202e" + "n" * 1_000_000


@pytest.mark.parametrize(
    "config",
    [
        TINY | {NASTY + "_size": 1},
        TINY | {"model_type": NASTY},
        TINY | {"architectures": [NASTY]},
        TINY | {"quantization_config": {"quant_method": "modelopt", "quantized_layers": {NASTY: {}}}},
        TINY | {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": {NASTY: []}}},
    ],
    ids=["field", "model_type", "architectures", "quantized_layers", "config_groups"],
)
def test_names_from_a_config_are_printed_escaped_and_truncated(config):
    with pytest.raises(TonnageError) as caught:
        planned(config)
    said = str(caught.value)
    assert said.isprintable()
    assert len(said) <= 3 * LONGEST_TEXT + 10


def test_names_from_a_checkpoint_header_are_printed_escaped_and_truncated(tmp_path):
    header = {NASTY: {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}
    (tmp_path / "model.safetensors").write_bytes(mutated_models.packed(header) + bytes(8))
    with pytest.raises(CheckpointError) as caught:
        read_folder(tmp_path)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) <= 3 * LONGEST_TEXT + 10


def test_names_in_plan_notes_are_escaped_and_truncated():
    plan = planned(TINY | {NASTY + "bias": True})
    assert any("bias" in note or "red" in note for note in plan.notes)
    assert all(note.isprintable() and len(note) <= 2 * LONGEST_TEXT for note in plan.notes)


@pytest.fixture
def summed(monkeypatch) -> list[tuple[str, int, str | None]]:
    """Format, ranks and GPU of each sum over a model's tensors."""
    found = []
    hold = sizing.hold_weights

    def held(part, quantization, flags, *copies):
        found.append((quantization.scheme, flags.tensor_parallel_size, flags.gpu))
        return hold(part, quantization, flags, *copies)

    monkeypatch.setattr(sizing, "hold_weights", held)
    return found


DEEP = "deepseek-ai__DeepSeek-V3"


def test_advice_computes_the_weights_of_equal_quantizations_once(summed):
    plain = config_of(DEEP)
    del plain["quantization_config"]  # which the hf engine does not read
    plan = plan_or_advise(ModelSource("m", "m", plain, "folder"), Deployment(device_memory=1 << 30))
    assert any(words.startswith("a device of") for words in plan.advice)
    # once as it is and in each smaller format: lengths, batches and a larger device change no weight
    assert len(summed) == len(set(summed)) == 1 + len(engine_of("hf").smaller["cpu"])
    summed.clear()
    flags = Deployment(engine="vllm", gpu="h100-80g")
    plan_or_advise(ModelSource("m", "m", config_of(DEEP), "folder"), flags)
    once = [*(("fp8-block", ranks, "h100-80g") for ranks in (1, 2, 4, 8, 16)), ("fp8-block", 1, None)]
    once += [("fp8-block", 8, "h100-80g")] * 2  # the two stages of the smallest layout
    assert summed == once


def test_no_advice_is_computed_for_models_with_implausibly_many_layers(summed):
    config = config_of(DEEP) | {"num_hidden_layers": LIMITS["layers"]}
    plan = plan_or_advise(ModelSource("m", "m", config, "folder"), Deployment(engine="vllm", gpu="h100-80g"))
    assert not plan.fits
    assert len(summed) <= 2  # on its GPU, and on one of another size
    with pytest.raises(ConfigError, match="num_hidden_layers: 1001 is not between 1 and 1000"):
        planned(config | {"num_hidden_layers": 1001})


@pytest.mark.timeout(600)
def test_mutated_configs_are_planned_or_rejected_within_a_time_limit():
    """The limit of time is one for a busy machine; the whole run's is two seconds."""
    program = [
        sys.executable,
        mutated_models.__file__,
        "--configs",
        "200",
        "--headers",
        "100",
        "--seconds",
        "60",
    ]
    run = subprocess.run([*program, "--json"], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert json.loads(run.stdout)["found"] == []


def test_folder_name_with_terminal_escapes_is_printed_escaped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "\x1b[31mred\x07"
    folder.mkdir()
    shutil.copy(CONFIGS / "meta-llama__Llama-3.2-1B.json", folder / "config.json")
    for more in ([], ["--explain"], ["--markdown"], ["--csv"], ["--sweep"], ["--target-concurrency", "2"]):
        assert run([str(folder), "--gpu", "h100-80g", "--max-model-len", "4096", *more]) in (0, 1)
        said = capsys.readouterr()
        assert "\x1b" not in said.out + said.err
        assert "\x07" not in said.out + said.err


class HubAnswer(io.BytesIO):
    """An answer of a hub."""

    status = 206

    def __init__(self, body: bytes, headers: dict[str, str]) -> None:
        super().__init__(body)
        self.headers = headers


def remote(body: bytes, headers: dict[str, str]) -> Remote:
    """Return the client of a hub that gives the same answer to each request."""
    return Remote(HubModel("org/name"), lambda *request, **more: HubAnswer(body, headers))


@pytest.mark.parametrize("body", [b"[" * 100_000, b"5", b"null", b"{"])
def test_hub_response_without_a_list_of_files_is_rejected(body: bytes) -> None:
    with pytest.raises(CheckpointError, match="the hub's list of files"):
        remote(body, {}).files()


@pytest.mark.parametrize("size", ["9" * 5000, "\u00b2", "-1", ""])
def test_hub_header_whose_size_is_no_number_is_ignored_or_rejected(size: str) -> None:
    assert remote(b"{}", {"Content-Length": size}).read("config.json", 100) == b"{}"
    with pytest.raises(CheckpointError, match="did not send the requested range"):
        remote(b"{}", {"Content-Range": f"bytes 0-1/{size}"}).first_bytes("model.safetensors", 100)
