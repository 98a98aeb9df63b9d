"""A family is one row in the module that builds it, and what an engine knows of it is in that row."""

from __future__ import annotations

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


def test_each_type_stands_in_one_module():
    assert rows() == Counter(families().keys())
    assert len(known_model_types()) > 140


def test_an_unknown_type_has_no_family():
    for unknown in ("brand_new", "", None, 3, ["llama"]):
        assert family_of(unknown) is NO_FAMILY


def test_every_reason_has_a_sentence():
    assert {"served", *REASONS} == set(get_args(Paged))


def test_the_most_asked_for_family_imports_no_other():
    code = (
        "import sys; from tonnage.planner.families.registry import family_of; family_of('llama'); "
        "print(*(name for name, module in sys.modules.items() if getattr(module, 'FAMILIES', None)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["tonnage.planner.families.llama"]


def test_a_new_file_is_enough(tmp_path, monkeypatch):
    """A module that nothing names but the folder it lies in, in a process of its own."""
    here = tmp_path / "tonnage" / "planner"
    shutil.copytree(FOLDER.parent, here, ignore=shutil.ignore_patterns("__pycache__"))
    (here.parent / "__init__.py").touch()
    (here / "families" / "brand_new.py").write_text(
        "from tonnage.planner.families.family import Family\n"
        "from tonnage.planner.families.dense import Variant\n"
        "FAMILIES = {'brand_new': Family(Variant('BrandNewForCausalLM').build, lora=('q_proj',))}\n"
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
