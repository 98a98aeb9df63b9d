"""Tests of the page of vLLM's model classes (benchmarks/vllm_registry.py)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from serving import PATIENCE

from tonnage.planner.engines.version import parse_version
from tonnage.planner.engines.vllm.startup_failures import class_of
from tonnage.planner.errors import TonnageError
from tonnage.planner.families.registry import build_architecture

ROOT = Path(__file__).parent.parent.parent
REGISTRY = ROOT / "tests" / "data" / "registry" / "vllm_0330.json"
ARCHITECTURES = ROOT / "planner" / "engines" / "vllm" / "architectures.json"


def classes() -> set[str]:
    """Return the classes of vLLM 0.33.0's registry that serve a model."""
    return {name for names in json.loads(REGISTRY.read_text())["groups"].values() for name in names}


def run(option: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "benchmarks/vllm_registry.py", option],
        capture_output=True, text=True, timeout=PATIENCE, cwd=ROOT,
    )  # fmt: skip


def test_documentation_page_of_vllms_model_registry_equals_the_generated_one():
    assert run("--check").returncode == 0, "python benchmarks/vllm_registry.py writes it"


def test_at_most_19_percent_of_vllms_model_classes_need_extra_packages():
    found = json.loads(run("--json").stdout)
    assert found["classes"] == len(classes())
    assert found["share_refused_without_extras"] <= 0.19
    assert found["refused"] == 0


def test_planner_knows_every_model_class_of_vllms_registry():
    known = json.loads(ARCHITECTURES.read_text())
    gone = known["until"].keys() | known["removed"].keys()
    ours = {name for name in (*known["oldest"], *known["first"]) if name not in gone}
    assert not classes() - ours


CONFIGS = sorted((ROOT / "tests" / "data" / "configs").glob("*__*.json"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_planner_plans_no_model_class_outside_vllms_registry(path):
    if path.name.endswith(".quant.json"):
        return
    try:
        architecture = build_architecture(json.loads(path.read_text()))
    except TonnageError as error:
        pytest.skip(str(error))
    found = class_of(architecture, parse_version("0.33.0"))
    assert found is None or found in classes() or architecture.kind == "encoder"


PARAMETERS = json.loads((REGISTRY.parent / "parameters.json").read_text())["parameters"]


@pytest.mark.parametrize("line", (REGISTRY.parent / "configs.jsonl").read_text().splitlines(), ids=lambda _: "")
def test_planned_parameters_of_default_configs_equal_transformers(line):
    config = json.loads(line)
    name = config["architectures"][0]
    if name in PARAMETERS:
        assert build_architecture(config).parameters == PARAMETERS[name]
