"""Write docs/registry.md: what the planner does with each model class of a vLLM release.

    python benchmarks/vllm_registry.py              writes docs/registry.md
    python benchmarks/vllm_registry.py --check      exits with 1 if the page is out of date
    python benchmarks/vllm_registry.py --json       prints the counts
    python benchmarks/vllm_registry.py --read registry.py    writes the classes of vLLM's registry.py (JSON)

A class is planned from a public config, from the defaults of a config class, or from a model's known sizes
(tests/data/SOURCES.md says which). Importing transformers is blocked, so the page is that of an installation
without extras.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "registry.md"
CONFIGS = ROOT / "tests" / "data" / "configs"
REGISTRY = ROOT / "tests" / "data" / "registry" / "vllm_0330.json"
DEFAULTS = ROOT / "tests" / "data" / "registry" / "configs.jsonl"
GPU = "b300-288g"  # the GPU of the catalogue with the most memory

EXACT, MODULES, REFUSED, UNKNOWN = "planned", "by transformers", "refused", "no config"
WORDS = {
    EXACT: "exactly, without extras",
    MODULES: "from transformers' modules, with the extra `hf`",
    REFUSED: "no",
    UNKNOWN: "not known: no public config was found",
}


@dataclass(frozen=True)
class ClassRow:
    """One class of the registry, with its group, what the planner does, and why it refuses."""

    name: str
    group: str
    outcome: str
    why: str = ""


def read_registry(source: str) -> dict[str, list[str]]:
    """Return the class names of each dict of vLLM's registry.py, by the dict's name."""
    found = {}
    for node in ast.parse(source).body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(target, ast.Name) and isinstance(getattr(node, "value", None), ast.Dict):
            keys = node.value.keys  # type: ignore[attr-defined]
            found[target.id] = [key.value for key in keys if isinstance(key, ast.Constant)]
    return {name: classes for name, classes in found.items() if name.endswith("_MODELS")}


def configs() -> dict[str, dict[str, Any]]:
    """Return a config of each class that one is known for: a public one, else transformers' defaults."""
    found = {}
    for line in DEFAULTS.read_text().splitlines():
        config = json.loads(line)
        found[config["architectures"][0]] = config
    for path in sorted(CONFIGS.glob("*__*.json")):
        if path.name.startswith("transformers-default") or path.name.endswith(".quant.json"):
            continue
        config = json.loads(path.read_text())
        for name in (config.get("architectures") or ())[:1]:
            found[name] = config
    return found


def rows() -> list[ClassRow]:
    """Return all classes of the registry, in its order of groups."""
    registry = json.loads(REGISTRY.read_text())
    known = configs()
    return [
        _row(name, group, known.get(name), registry["version"])
        for group, names in registry["groups"].items()
        for name in names
    ]


def _row(name: str, group: str, config: dict[str, Any] | None, version: str) -> ClassRow:
    from tonnage.planner.deployment import Deployment
    from tonnage.planner.errors import TonnageError, UnsupportedArchitecture
    from tonnage.planner.planning.build import plan_source
    from tonnage.planner.source.resolve import ModelSource

    if config is None:
        return ClassRow(name, group, UNKNOWN)
    flags = Deployment(engine="vllm", engine_version=version, device="cuda", gpu=GPU)
    try:
        plan_source(ModelSource(name, name, config, "folder"), flags)
    except UnsupportedArchitecture as error:
        if error.field == "model_type" and "tonnage[hf]" in str(error):
            return ClassRow(name, group, MODULES)
        return ClassRow(name, group, REFUSED, str(error))
    except TonnageError as error:
        return ClassRow(name, group, REFUSED, str(error))
    return ClassRow(name, group, EXACT)


def counts(found: list[ClassRow]) -> dict[str, Any]:
    """Return how many classes have each outcome, and the share of those with a config that is not exact."""
    outcome = Counter(row.outcome for row in found)
    with_config = len(found) - outcome[UNKNOWN]
    return {
        "classes": len(found),
        **{name: outcome[name] for name in WORDS},
        "share_refused_without_extras": 1 - outcome[EXACT] / with_config,
    }


def page(found: list[ClassRow]) -> str:
    """Return the page as Markdown."""
    registry = json.loads(REGISTRY.read_text())
    outcome = Counter(row.outcome for row in found)
    groups = list(registry["groups"])
    lines = [
        f"# Model classes of vLLM {registry['version']}",
        "",
        f"This page lists the {len(found)} model classes in the registry of vLLM {registry['version']}, and",
        "what `tonnage plan` does with each. Classes of drafts, of plugins and of transformers' own modules",
        "are not listed. Each class is planned from a public config.json, from the defaults of a config",
        "class, or from known sizes of one of its models (tests/data/SOURCES.md says which).",
        "`python benchmarks/vllm_registry.py` writes the page.",
        "",
        "| planned | " + " | ".join(groups) + " | all |",
        "| --- |" + " ---: |" * (len(groups) + 1),
    ]
    for name, words in WORDS.items():
        each = (sum(row.group == group and row.outcome == name for row in found) for group in groups)
        lines.append(f"| {words} | {' | '.join(map(str, each))} | {outcome[name]} |")
    lines += ["", "Other model classes are refused by name, with the releases of vLLM that have them.", ""]
    for name, words in WORDS.items():
        own = [row for row in found if row.outcome == name]
        if not own:
            continue
        lines += [f"## {words[0].upper()}{words[1:]}", ""]
        if name == REFUSED:
            lines += [f"- `{row.name}`: {_first_sentence(row.why)}" for row in own]
        else:
            for group in groups:
                names = ", ".join(f"`{row.name}`" for row in own if row.group == group)
                if names:
                    lines.append(f"- {group}: {names}")
        lines.append("")
    return "\n".join(lines)


def _first_sentence(why: str) -> str:
    return why.split(" (")[0].replace("|", "\\|").replace("<", "&lt;")


def main() -> int:
    """Write the page, check it, or print the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit with 1 if the page is out of date")
    parser.add_argument("--json", action="store_true", help="print the counts as one JSON object")
    parser.add_argument("--read", type=Path, help="print the classes of this registry.py as JSON")
    options = parser.parse_args()
    if options.read:
        print(json.dumps(read_registry(options.read.read_text()), indent=1))
        return 0
    sys.modules["transformers"] = None  # type: ignore[assignment]
    found = rows()
    if options.json:
        print(json.dumps(counts(found)))
        return 0
    text = page(found)
    stale = not PAGE.is_file() or PAGE.read_text() != text
    if options.check:
        return int(stale)
    if stale:
        PAGE.write_text(text)
        print(f"written: {PAGE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
