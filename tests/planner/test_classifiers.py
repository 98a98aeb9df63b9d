"""Tests of classifiers: heads with one row per label on decoders and encoders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tonnage.planner.deployment import Deployment
from tonnage.planner.engines.vllm.startup_failures import class_of
from tonnage.planner.errors import UnsupportedArchitecture
from tonnage.planner.families.registry import build_architecture
from tonnage.planner.planning.build import plan_source
from tonnage.planner.source.resolve import ModelSource

DATA = Path(__file__).parent.parent / "data" / "configs"
LLAMA = json.loads((DATA / "meta-llama__Meta-Llama-3.1-8B.json").read_text())
GPU = Deployment(engine="vllm", engine_version="0.33.0", device="cuda", gpu="h100-80g", max_model_len=8192)


def classifier(name: str, **fields: object) -> ModelSource:
    return ModelSource(name, name, {**LLAMA, "architectures": [name], **fields}, "folder")


@pytest.mark.parametrize(
    ("name", "fields", "parameters"),
    [
        ("LlamaForSequenceClassification", {}, 2 * 4096),
        ("LlamaForSequenceClassification", {"num_labels": 1}, 4096),
        ("LlamaForSequenceClassification", {"id2label": {"0": "a", "1": "b", "2": "c"}}, 3 * 4096),
        ("LlamaForTokenClassification", {"num_labels": 5}, 5 * 4096 + 5),
    ],
)
def test_classifier_head_adds_the_expected_parameters(name, fields, parameters):
    body = build_architecture({**LLAMA, "architectures": ["LlamaModel"]})
    found = build_architecture({**LLAMA, "architectures": [name], **fields})
    assert found.parameters - body.parameters == parameters
    assert found.class_name == name


@pytest.mark.parametrize("name", ["LlamaModel", "LlamaForSequenceClassification"])
def test_vllm_plan_of_a_classifier_uses_the_pooling_runner_by_default(name):
    plan = plan_source(classifier(name), GPU)
    assert plan.deployment.runner == "pooling"
    assert plan.fits


def test_engines_other_than_vllm_reject_a_decoder_classifier():
    for engine in ("hf", "sglang", "llama.cpp"):
        with pytest.raises(UnsupportedArchitecture, match="LlamaForSequenceClassification"):
            plan_source(classifier("LlamaForSequenceClassification"), Deployment(engine=engine))


def test_encoder_classifier_is_recognized_and_keeps_its_vllm_class():
    config = {
        "architectures": ["BertForTokenClassification"], "model_type": "bert", "hidden_size": 768,
        "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12, "vocab_size": 30522,
        "max_position_embeddings": 512, "torch_dtype": "float32",
    }  # fmt: skip
    architecture = build_architecture(config)
    assert architecture.is_classifier
    assert class_of(architecture, (0, 33, 0)) == "BertForTokenClassification"


def test_training_plan_of_a_classifier_has_logits_for_its_labels_only():
    found = build_architecture({**LLAMA, "architectures": ["LlamaForSequenceClassification"], "num_labels": 3})
    assert found.recipe.logits == 3
    assert build_architecture(LLAMA).recipe.logits == LLAMA["vocab_size"]
