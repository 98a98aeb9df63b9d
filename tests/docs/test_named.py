"""Names in the documentation other than commands must exist: metrics, flags, key settings and lines of code."""

from __future__ import annotations

import re
import textwrap
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest
from metric_families import AUTO_FAMILIES, AUTO_LEARNED_FAMILIES, FAMILIES
from shown import ROOT, pages

from tonnage.cache.disk.metrics import METRICS, metric_name
from tonnage.server.cli import COMMANDS, parser_of
from tonnage.server.engines.hf.model.support import served
from tonnage.server.engines.vllm.params import KEY, WEIGHT
from tonnage.server.observe.metrics.tier import HOST_METRICS, host_metric_name
from tonnage.server.security.keys import load_keys

# Besides `tonnage serve`: metrics of a watch (server/watch/exporter.py), of our plug-in in vLLM
# (server/observe/vllm), and what the metrics of a tenant begin with.
ELSEWHERE = {
    "tonnage_watch_info", "tonnage_watch_up", "tonnage_watch_restarts_total", "tonnage_watch_failures_total",
    "tonnage_plugin_errors_total",
}  # fmt: skip
# Flags of other programs, which the tests that run these read.
FOREIGN = {
    "lmcache": {"--l1-size-gb"},
    "vllm": {
        "--additional-config", "--api-server-count", "--disable-log-stats", "--max-num-active-seqs",
        "--prefill-schedule-interval", "--scheduler-cls",
    },
    "servers to watch": {"--enable-metrics", "--metrics"},
    "docker, helm, systemctl, uvx": {"--target", "--set", "--now", "--from"},
    "our scripts": {
        "--activations", "--all", "--behind", "--check", "--cost", "--costs", "--matrix", "--minutes",
        "--models", "--operations", "--sections", "--stacks", "--steps",
    },
    "tonnage itself": {"--version"},
    "refused in an example": {"--max-model-length"},
}  # fmt: skip
# Contributor pages have the flags of many scripts; test_commands.py checks them.
SCRIPTS = (ROOT / "CONTRIBUTING.md", ROOT / "benchmarks/README.md")
# A path in a code span, to be found under any folder of ours: `blocks/pool.py`, `api/*/protocol.py`, `http/`.
PATH = re.compile(r"`((?:[\w.*-]+/)*[\w.*-]+(?:/|\.(?:py|json|jsonl|md|toml|tsv|yaml|yml)))(?=[`: ])")
PLACES = ("planner", "cache", "server", "deploy", "docs", "tests", "benchmarks", ".ci", "pyproject.toml")


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_files_named_in_the_documentation_exist(page: Path) -> None:
    named = {name for name in PATH.findall(page.read_text()) if "/" in name or name.endswith(".py")}
    assert [n for n in sorted(named) if not any(fnmatch(at, f"*/{n}") for at in ours())] == []


@cache
def ours() -> list[str]:
    """Every file and folder of ours below the root, folders with a stroke at their end."""
    found = [path for place in PLACES for path in (ROOT / place, *(ROOT / place).rglob("*"))]
    return [f"/{path.relative_to(ROOT)}" + "/" * path.is_dir() for path in found]


@pytest.mark.parametrize("package", ["planner", "cache", "server"])
def test_readme_of_a_package_names_every_module(package: str) -> None:
    text = (ROOT / package / "README.md").read_text()
    modules = [path for path in (ROOT / package).iterdir() if path.name[0].isalpha()]
    assert [
        module.name
        for module in modules
        if (module.suffix == ".py" or module.is_dir()) and not re.search(rf"\b{module.stem}\b", text)
    ] == []


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_metrics_named_in_the_documentation_exist(page: Path) -> None:
    known = {
        *FAMILIES,
        *AUTO_FAMILIES,
        *AUTO_LEARNED_FAMILIES,
        *ELSEWHERE,
        KEY,
        WEIGHT,
        *map(metric_name, METRICS),
        *map(host_metric_name, HOST_METRICS),
    }
    for name in re.findall(r"\btonnage_[a-z0-9_]+\b\*?", page.read_text()):
        assert any(each.startswith(name[:-1]) for each in known) if name.endswith("*") else name in known, name


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_flags_named_in_the_documentation_exist(page: Path) -> None:
    if page in SCRIPTS:
        return
    ours = {
        option for name in COMMANDS for action in parser_of(name)._actions for option in action.option_strings
    }
    named = set(re.findall(r"(?<![\w/-])--[a-z][\w-]+", page.read_text()))
    assert named <= ours.union(*FOREIGN.values())


def test_every_listed_flag_of_another_program_occurs_in_the_documentation() -> None:
    text = "".join(page.read_text() for page in pages())
    assert all(flag in text for flags in FOREIGN.values() for flag in flags)


def test_api_key_file_shown_in_the_documentation_is_valid(tmp_path: Path) -> None:
    (block,) = re.findall(
        r"^    \[\[key\]\]\n(?:(?:    .*)?\n)+", (ROOT / "docs/operations.md").read_text(), re.M
    )
    file = tmp_path / "keys.toml"
    text = textwrap.dedent(block).replace('sha256 = "..."', f'sha256 = "{"0f" * 32}"')
    file.write_text(text.replace('\nkey = "..."', '\nkey = "a-key-of-the-documentation"'))
    ring = load_keys([], file)
    scraping = ring.tenant(b"a-key-of-the-documentation")
    assert scraping is not None
    assert (scraping.name, scraping.metrics) == ("prometheus", True)


def test_documentation_names_the_same_model_families_as_the_source_code() -> None:
    source = (ROOT / "planner/families/llama.py").read_text()
    (shown,) = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs/contributing.md").read_text(), re.M | re.S)
    assert textwrap.indent(shown, "    ") in source
    assert textwrap.indent(shown, "    ") in (ROOT / "planner/README.md").read_text()


def test_documentation_lists_every_served_model_type() -> None:
    text = (ROOT / "docs/engines.md").read_text()
    (listed,) = re.findall(r"\n\n((?:`[\w-]+`,\s)+`[\w-]+`)\.\n", text)
    assert tuple(re.findall(r"`([\w-]+)`", listed)) == served()
