"""Tests of the engine registry: lookup by name, separate imports, and vLLM's rules by version."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import tonnage.planner.engines.registry as registry
from tonnage.planner.command import run
from tonnage.planner.deployment import Deployment
from tonnage.planner.engines.registry import ENGINES, engine_of
from tonnage.planner.engines.vllm.versions import _CHANGES, NEWEST, VersionRules, rules
from tonnage.planner.errors import DeploymentError
from tonnage.planner.planning.build import make_plan

PLANNER = Path(registry.__file__).parents[1]


def test_engine_of_a_plan_is_found_by_its_name():
    for name in ENGINES:
        engine = engine_of(name)
        assert engine.name == name
        assert engine is engine_of(name)
        assert set(engine.batch) == set(engine.blocks) == {"cpu", "cuda"}
    with pytest.raises(DeploymentError, match="'tgi' is not one of hf, vllm"):
        engine_of("tgi")


@pytest.mark.parametrize("name", ENGINES)
def test_loading_one_engine_imports_no_other_engine(name):
    """A plan needs one engine; importing the others would slow its start."""
    code = (
        "import sys; from tonnage.planner.engines.registry import ENGINES, engine_of\n"
        f"engine_of({name!r})\n"
        "print([n for n in ENGINES if 'tonnage.planner.engines.' + n.replace('.', '_') in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ast.literal_eval(done.stdout) == [name]


NEW = """
from typing import ClassVar

from tonnage.planner.engines.base import Engine
from tonnage.planner.engines.pool import token_pool


class TensorRT(Engine):
    name, title, newest = "tensorrt-llm", "TensorRT-LLM", (1, 0, 0)
    batch: ClassVar = {"cpu": (8, 512), "cuda": (8, 512)}
    blocks: ClassVar = {"cpu": 1, "cuda": 1}

    def decoder_pool(self, architecture, chosen):
        size = sum(2 * layer.kv_heads * layer.head_size for layer in architecture.cache_layers)
        return token_pool(architecture, 2 * size, chosen.flags.kv_cache_dtype, 2)

    def serve_lines(self, plan):
        return (f"trtllm-serve {plan.model.id} --max_batch_size {plan.deployment.max_num_seqs}",)


ENGINE = TensorRT()
"""


def test_new_engine_can_be_added_with_a_single_module(monkeypatch, capsys):
    """Planning, sweeps and advice take everything about an engine from its module."""
    module = ModuleType("tensorrt_llm")
    exec(NEW, module.__dict__)
    monkeypatch.setitem(sys.modules, "tonnage.planner.engines.tensorrt_llm", module)
    monkeypatch.setattr(registry, "ENGINES", (*ENGINES, "tensorrt-llm"))
    flags = ["demo", "--engine", "tensorrt-llm", "--gpu", "h100-80g"]
    assert run([*flags, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["deployment"]["engine_version"] == "1.0.0"
    assert plan["deployment"]["max_num_seqs"] == 8
    assert plan["kv_cache"]["tokens"] > 1000
    assert run([*flags, "--serve-line"]) == 0
    assert capsys.readouterr().out == "trtllm-serve demo --max_batch_size 8\n"
    assert run([*flags, "--sweep"]) == 0
    assert run([*flags, "--enable-lora", "--speculative-model", "demo"]) == 2
    assert "tensorrt-llm drafts are not planned" in capsys.readouterr().err


def test_error_for_an_unsupported_kv_cache_dtype_names_the_requested_engine(capsys):
    flags = ["--engine", "sglang", "--gpu", "h100-80g", "--dtype", "bfloat16", "--kv-cache-dtype", "float32"]
    assert run(["demo", *flags]) == 2
    assert "SGLang has no float32 KV cache for a 16-bit model" in capsys.readouterr().err


def test_sglang_has_no_float16_cache_for_a_bfloat16_model(capsys):
    flags = ["--engine", "sglang", "--gpu", "h100-80g", "--dtype", "bfloat16", "--kv-cache-dtype", "float16"]
    assert run(["demo", *flags]) == 2
    assert "SGLang has no --kv-cache-dtype float16 for a model in bfloat16" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "share", "tokens"),
    [
        ({"gpu": "h100-80g"}, 0.83, 8192),  # as the log of a 0.5.23 start prints it
        ({"gpu": "h100-80g", "engine_version": "0.5.4"}, 0.835, 8192),  # prefills were not captured
        ({"gpu": "h100-80g", "engine_version": "0.4.6"}, 0.88, 2048),
        ({"gpu": "h100-80g", "enforce_eager": True}, 0.841, 8192),
        ({"gpu": "h100-80g", "mem_fraction_static": 0.5}, 0.5, 8192),
        ({"device": "cuda", "device_memory": 24 << 30}, 0.704, 4096),
        ({"device": "cuda", "device_memory": 16 << 30}, 0.752, 2048),
        ({"device": "cuda", "device_memory": 180 << 30}, 0.854, 16384),
    ],
)
def test_sglang_plan_has_sglangs_default_memory_fraction_and_batched_tokens(flags, share, tokens):
    """The rule is handle_gpu_memory_settings (arg_groups/memory_hook.py, SGLang 0.5.23)."""
    chosen = make_plan("demo", Deployment(engine="sglang", **flags)).deployment
    assert chosen.mem_fraction_static == pytest.approx(share, abs=0.0011)
    assert chosen.max_num_batched_tokens == tokens


def test_planner_code_never_branches_on_engine_names():
    """Differences between engines are engine methods, because a name comparison would miss a new engine."""
    for path in PLANNER.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Compare) or not isinstance(node.left, ast.Attribute | ast.Name):
                continue
            compared = node.left.attr if isinstance(node.left, ast.Attribute) else node.left.id
            constants = {
                c.value for side in node.comparators for c in ast.walk(side) if isinstance(c, ast.Constant)
            }
            assert compared != "engine" or not constants & set(ENGINES), f"{path.name}:{node.lineno}"


def test_vllm_version_rules_are_in_order_and_each_changes_a_value():
    versions = [since for since, _ in _CHANGES]
    assert versions == sorted(set(versions))
    assert versions[-1] == NEWEST == engine_of("vllm").newest
    assert rules((0, 7, 0)) == VersionRules()
    before = VersionRules()
    for since, changed in _CHANGES:
        now = rules(since)
        for name in VersionRules.__match_args__:
            assert getattr(now, name) == changed.get(name, getattr(before, name))
        assert all(getattr(before, name) != value for name, value in changed.items())
        before = now
    assert rules((99, 0, 0)) == rules(NEWEST)
