"""Tests of the family registry: one row per model type, which holds all that engines need."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from collections import Counter
from importlib import import_module
from pathlib import Path
from typing import get_args

import tonnage.planner.families as folder
from tonnage.planner.families.family import NO_FAMILY, Paged
from tonnage.planner.families.registry import families, family_of, known_model_types
from tonnage.server.engines.hf.model.support import REASONS

FOLDER = Path(folder.__file__).parent


def rows() -> Counter[str]:
    modules = (import_module(f"{folder.__name__}.{path.stem}") for path in FOLDER.glob("[a-z]*.py"))
    return Counter(name for module in modules for name in getattr(module, "FAMILIES", {}))


def test_each_model_type_is_registered_in_one_module():
    assert rows() == Counter(families().keys())
    assert len(known_model_types()) > 140


def choices_by_model_type(tree: ast.AST) -> list[int]:
    """Return the lines that choose by the value of ``model_type``: comparisons, tables and its own methods."""

    def named(node: ast.AST) -> bool:
        return isinstance(node, ast.Name) and node.id == "model_type"

    def chooses(node: ast.AST) -> bool:
        if isinstance(node, ast.Compare):
            return any(named(side) for side in (node.left, *node.comparators))
        if isinstance(node, ast.Subscript):
            return named(node.slice)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            return named(node.func.value) or (node.func.attr == "get" and any(map(named, node.args)))
        return isinstance(node, ast.Match) and named(node.subject)

    return [node.lineno for node in ast.walk(tree) if chooses(node)]


def test_no_architecture_builder_branches_on_the_model_type():
    """Differences between families are in their rows; only registry.py, meta.py and pooled.py look types up."""
    assert choices_by_model_type(ast.parse("a = model_type == 'llama' or TABLE[model_type]")) == [1, 1]
    for path in FOLDER.glob("[a-z]*.py"):
        if path.name not in ("registry.py", "meta.py", "pooled.py"):
            assert not choices_by_model_type(ast.parse(path.read_text())), path.name


def test_unknown_model_type_has_no_registered_family():
    for unknown in ("brand_new", "", None, 3, ["llama"]):
        assert family_of(unknown) is NO_FAMILY


def test_every_reason_code_for_a_missing_paged_kv_cache_has_a_message():
    assert {"served", *REASONS} == set(get_args(Paged))


def test_loading_the_llama_family_imports_no_other_model_family():
    code = (
        "import sys; from tonnage.planner.families.registry import family_of; family_of('llama'); "
        "print(*(name for name, module in sys.modules.items() if getattr(module, 'FAMILIES', None)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["tonnage.planner.families.llama"]


def test_new_model_family_can_be_added_with_a_single_module(tmp_path, monkeypatch):
    """A new module is found by its folder alone, in a separate process."""
    here = tmp_path / "tonnage" / "planner"
    shutil.copytree(FOLDER.parent, here, ignore=shutil.ignore_patterns("__pycache__"))
    (here.parent / "__init__.py").touch()
    (here / "families" / "brand_new.py").write_text(
        "from tonnage.planner.families.family import Family\n"
        "from tonnage.planner.families.dense import DenseVariant\n"
        "FAMILIES = {'brand_new': Family(DenseVariant('BrandNewForCausalLM').build, lora=('q_proj',))}\n"
    )
    code = (
        "from tonnage.planner.families.registry import build_architecture, family_of\n"
        "import json; config = json.load(open(__import__('sys').argv[1]))\n"
        "built = build_architecture({**config, 'model_type': 'brand_new', 'architectures': None})\n"
        "print(built.parameters, family_of('brand_new').lora)"
    )
    config = Path(__file__).parent.parent / "data/configs/meta-llama__Meta-Llama-3.1-8B.json"
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    command = [sys.executable, "-c", code, str(config)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout == "8030261248 ('q_proj',)\n"
