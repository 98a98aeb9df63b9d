"""The part of a classifier's config.json that the API reads: names of labels, and the form of text pairs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tonnage.planner.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ClassifierConfig:
    """The labels of a classifier and the form of its inputs; other models have no labels.

    Attributes:
        labels: name of each label by its index.
        separates: whether the tokenizer joins a pair of texts with its special tokens; otherwise the two texts
            are one text (vLLM's ``use_sep_token``).
        has_types: whether the model has an embedding for the tokens of the second of two texts.
    """

    labels: Mapping[int, str] = field(default_factory=dict)
    separates: bool = True
    has_types: bool = False


def read_classifier(folder: Path) -> ClassifierConfig:
    """Read the labels and the form of text pairs from a classifier's config.json.

    If the config names no labels, they are LABEL_0, LABEL_1 and so on. If it has no number of labels either,
    there are two (PreTrainedConfig, transformers 5.19).

    Raises:
        ConfigError: ``id2label`` or ``num_labels`` is invalid.
    """
    config: Any = json.loads((folder / "config.json").read_bytes())
    names = config.get("id2label")
    if not names:
        count = config.get("num_labels", 2)
        if not isinstance(count, int) or count < 1:
            raise ConfigError(f"{str(count)[:40]!r} is not a number of labels", field="num_labels")
        names = {at: f"LABEL_{at}" for at in range(count)}
    try:
        labels = {int(at): str(name) for at, name in names.items()}
    except (AttributeError, ValueError):
        raise ConfigError(f"{str(names)[:80]} does not map indices to names", field="id2label") from None
    # use_pad_token is vLLM's older name of use_sep_token (use_sep_token of ModelConfig, vLLM 0.32).
    older = config.get("use_pad_token")
    separates = config.get("use_sep_token", True) if older is None else older
    return ClassifierConfig(labels, bool(separates), (config.get("type_vocab_size") or 0) > 1)
