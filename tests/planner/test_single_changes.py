"""Tests of a small config with one field removed, emptied or changed, against transformers.

The planner raises a named error or plans what transformers builds. ``python tests/planner/single_changes.py``
checks every family (minutes).
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

_SPEC = importlib.util.spec_from_file_location("single_changes", Path(__file__).with_name("single_changes.py"))
single_changes = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(single_changes)

# attention, biases, experts, latents, windows, states, an encoder
FAMILIES = [
    "helium",
    "stablelm",
    "qwen2_moe",
    "deepseek_v3",
    "gemma3_text",
    "gpt_oss",
    "falcon_h1",
    "whisper",
]


@pytest.mark.parametrize("model_type", FAMILIES)
def test_config_with_one_changed_field_has_the_parameters_of_transformers(model_type):
    class_name, config = single_changes.base_of(model_type)
    assert single_changes.differences(class_name, config) == []
