"""Tests of the public names of ``tonnage.planner``, and of a Plan's display in prompt and notebook."""

from __future__ import annotations

import ast
import json
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime
from html.parser import HTMLParser
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import pytest
from html_pages import Document

import tonnage.planner
import tonnage.planner.headers.hub
from tonnage.planner import Deployment, DeploymentError, ModelNotFound, make_plan, plan, plan_to_dict
from tonnage.planner.command import run
from tonnage.planner.markup import write_page

ROOT = Path(__file__).resolve().parents[2]

# The public interface: removing a name breaks user programs.
SURFACE = {
    "plan", "make_plan", "plan_to_dict",
    "Deployment", "Plan", "KVCachePlan", "ModelInfo", "RankPlan", "Term",
    "TonnageError", "CheckpointError", "ConfigError", "DeploymentError", "ModelNotFound",
    "UnsupportedArchitecture",
}  # fmt: skip


def test_planner_package_exports_its_public_names() -> None:
    assert set(tonnage.planner.__all__) == SURFACE
    assert set(dir(tonnage.planner)) >= SURFACE
    scope: dict[str, object] = {}
    exec("from tonnage.planner import *", scope)
    assert scope.keys() >= SURFACE
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = tonnage.planner.nothing


def test_imports_for_type_checkers_equal_the_public_names() -> None:
    tree = ast.parse((ROOT / "planner" / "__init__.py").read_text())
    (told,) = [node.body for node in tree.body if isinstance(node, ast.If)]
    names = set()
    for node in told:
        assert isinstance(node, ast.ImportFrom)
        for alias in node.names:
            assert alias.asname == alias.name  # otherwise mypy --strict does not see the name
            assert getattr(import_module(node.module), alias.name) is getattr(tonnage.planner, alias.name)
            names.add(alias.name)
    assert names == SURFACE


def test_mypy_checks_the_keywords_of_the_plan_function(tmp_path: Path) -> None:
    packages = tmp_path / "packages" / "tonnage"
    packages.mkdir(parents=True)
    (packages / "planner").symlink_to(ROOT / "planner")
    program = tmp_path / "program.py"
    program.write_text(
        "from tonnage.planner import plan\n"
        "reveal_type(plan('demo', gpu='h100-80g', max_model_len=8192).kv_cache.tokens)\n"
        "plan('demo', max_model_len='8K')\n"
        "plan('demo', max_len=1)\n"
        "from tonnage.planner import nothing\n"
    )
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "--no-incremental", program]
    environment = {"MYPYPATH": str(packages.parent)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    lines = [line.removeprefix("program.py:") for line in done.stdout.splitlines()]
    assert '2: note: Revealed type is "int"' in lines
    refused = [(line[0], line.rpartition("  ")[2]) for line in lines if ": error: " in line]
    assert refused == [("3", "[arg-type]"), ("4", "[call-arg]"), ("5", "[attr-defined]")]


def test_importing_planner_package_imports_no_submodule() -> None:
    code = "import tonnage.planner, sys; print([m for m in sys.modules if m.startswith('tonnage.planner.')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("flags", "fields"),
    [
        ([], {}),
        (["--gpu", "h100-80g"], {"gpu": "h100-80g"}),
        (["--engine-version", "0.11.0", "--device-memory", "64GiB"],
         {"engine_version": "0.11.0", "device_memory": 64 << 30}),
        (["--engine", "hf", "--gpu", "cpu", "--kv-cache-memory-bytes", "512MiB"],
         {"engine": "hf", "gpu": "cpu", "kv_cache_memory_bytes": 512 << 20}),
        (["--gpu", "h100-80g", "--speculative-model", "demo"],
         {"gpu": "h100-80g", "speculative_model": "demo"}),
        (["--kv-cache-memory-bytes", "1MiB"], {"kv_cache_memory_bytes": 1 << 20}),  # does not fit: advice too
    ],
)  # fmt: skip
def test_plan_function_gives_the_same_plan_as_the_plan_command(flags, fields, capsys) -> None:
    code = run(["demo", *flags, "--json"])
    found = plan("demo", **fields)
    assert plan_to_dict(found) == json.loads(capsys.readouterr().out)
    assert found.fits is (code == 0)
    assert found.fits or found.advice


@pytest.mark.parametrize(
    ("flags", "fields"),
    [
        (["--max-lora-rank", "16"], {"max_lora_rank": 16}),
        (["--num-speculative-tokens", "2"], {"num_speculative_tokens": 2}),
        (["--mem-fraction-static", "0.8"], {"mem_fraction_static": 0.8}),
        (["--num-gpu-blocks-override", "9", "--engine", "hf"], {"num_gpu_blocks_override": 9, "engine": "hf"}),
        (["--device", "cpu", "--gpu", "h100-80g"], {"device": "cpu", "gpu": "h100-80g"}),
        (["--gpu", "h900"], {"gpu": "h900"}),
        (["--engine", "vlm"], {"engine": "vlm"}),
        (["--max-model-len", "9999999"], {"max_model_len": 9999999}),
    ],
)
def test_plan_function_raises_same_error_as_command(flags, fields, capsys) -> None:
    assert run(["demo", *flags]) == 2
    with pytest.raises(DeploymentError) as refused:
        plan("demo", **fields)
    assert capsys.readouterr().err == f"tonnage: {refused.value}\n"


@pytest.mark.parametrize(
    ("name", "value"),
    [("gpu", 5), ("engine_version", 5), ("tensor_parallel_size", None), ("device_memory", "80GiB"),
     ("tensor_parallel_size", 0), ("enable_lora", "yes"), ("cpu_offload_bytes", 0.5), ("engine", None)],
)  # fmt: skip
def test_plan_function_rejects_arguments_of_wrong_type(name, value) -> None:
    with pytest.raises(DeploymentError, match=f"--{name.replace('_', '-')}: {value!r} is not "):
        plan("demo", **{name: value})


def test_plan_function_rejects_unknown_model_and_keyword() -> None:
    with pytest.raises(ModelNotFound):
        plan("no such model")
    with pytest.raises(TypeError, match="max_len"):
        plan("demo", max_len=1)


@pytest.mark.parametrize("name", ["meta-llama__Meta-Llama-3.1-8B", "google__gemma-3-27b-it"])
def test_repr_of_a_plan_is_short(config_of, folder_with, name) -> None:
    found = make_plan(
        folder_with(config_of(name)), Deployment(engine="vllm", gpu="h100-80g", max_model_len=8192)
    )
    shown = repr(found)
    assert str(found) == shown
    assert len(shown.splitlines()) <= 8
    assert len(shown) < 1000
    cache = found.kv_cache
    for word in (
        found.model.architecture, "vllm 0.32.0", "h100-80g", "weights", "KV cache pool",
        f"{cache.num_blocks:,} blocks", f"{cache.tokens:,} tokens", f"{cache.max_concurrency:.2f}x", "Fits.",
    ):  # fmt: skip
        assert word in shown
    assert "Does not fit: 8 GiB" in repr(replace(found, fits=False, reasons=("8 GiB",)))


class Page(HTMLParser):
    """The tags, texts and attributes of an HTML page; every tag is closed unless HTML lets it stay open."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.said = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        assert {name for name, _ in attrs} <= {"class", "style"}  # no address, no handler

    def handle_data(self, data: str) -> None:
        self.said += data


def test_plan_notebook_html_is_complete_and_escaped(tmp_path: Path) -> None:
    found = plan("demo", gpu="h100-80g", max_model_len=8192)
    found = replace(found, model=replace(found.model, id="<script>alert(1)</script>&co"), notes=("a <b> note",))
    shown = Page(found._repr_html_())
    assert set(shown.tags) == {
        *("style", "div", "h2", "p", "dl", "dt", "dd", "small", "i"),
        *("table", "thead", "tbody", "tr", "th", "td"),
    }
    assert "<script>alert(1)</script>&co: LlamaForCausalLM" in shown.said
    assert "Note: a <b> note" in shown.said
    assert f"{found.kv_cache.tokens:,} tokens" in shown.said
    style = found._repr_html_().partition("</style>")[0].removeprefix("<style>")
    selectors = [one for rule in style.split("}")[:-1] for one in rule.partition("{")[0].split(",")]
    assert all(
        one.strip().startswith(".tonnage") for one in selectors
    )  # the notebook's own tables stay as they are
    write_page(str(tmp_path / "page.html"), "Memory plan", found.html())
    text = (tmp_path / "page.html").read_text()
    assert text.count(found.html()) == found._repr_html_().count(found.html()) == 1
    assert Document(text).scripts == 1


def test_html_pages_use_colours_of_planner_page() -> None:
    style = (ROOT / "planner" / "page" / "data" / "style.css").read_text()
    ours = plan("demo")._repr_html_()
    for name in ("paper", "ink", "soft", "line", "field", "accent", "bad", "good", "free"):
        light, dark = re.findall(rf"--{name}: (#\w+);", style)
        assert f"--{name}:light-dark({light},{dark})" in ours
    for name in ("weights", "pool", "activation", "graphs", "framework", "lora", "draft"):
        (colour,) = re.findall(rf"--{name}: (#\w+);", style)
        assert f"--{name}:{colour}" in ours


def test_html_page_shows_command_without_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tonnage.planner.headers.hub, "_explicit", False)
    monkeypatch.setenv("HF_TOKEN", "")
    page = str(tmp_path / "a page.html")
    flags = ["demo", "--engine-version", "0.32.0", "--max-model-len", "2048", "--html", page]
    token = ["--hf-token", "hf_secret", "--hf_token=hf_secret"]
    for asked, facts, rows in (
        (["--gpu", "h100-80g", "-tp", "3"], ("demo", "vllm 0.32.0", "3 x h100-80g"), 7),
        (["--gpu", "h100-80g,l4-24g"], ("demo", "vllm 0.32.0", "h100-80g, l4-24g"), 3),
    ):
        assert run([*flags, *asked, *token]) == 0
        text = Path(page).read_text()
        found = Document(text)
        words = ["tonnage", "plan", *flags, *asked, "--hf-token", "...", "--hf-token=..."]
        assert found.command == shlex.join(words)
        assert "hf_secret" not in text
        assert tuple(found.facts[name] for name in ("model", "engine", "device")) == facts
        assert found.facts["made by"] == f"Tonnage {version('tonnage')}"
        assert found.facts["made at"].startswith(f"{datetime.now(UTC):%Y-%m-}")
        assert (found.rows, found.scripts) == (rows, 1)
