"""Section ``vllm_blocks``: blocks, tokens and concurrency compared with vLLM's own KV-config functions (CPU).

The table has 0.32.0 for every config, and thirteen versions (vllm_versions.py) with the groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from accuracy import vllm_versions
from accuracy.common import Inputs, Section, read_tsv
from tonnage.planner.deployment import Deployment
from tonnage.planner.devices import host
from tonnage.planner.errors import TonnageError
from tonnage.planner.planning.build import plan_source
from tonnage.planner.planning.size import Sizer
from tonnage.planner.plans import KVCachePlan
from tonnage.planner.source.resolve import ModelSource

NAME = "vllm_blocks"


class VersionPlans:
    """Plans of one config by vLLM's rules on a CPU, version by version."""

    def __init__(self, name: str, config: Mapping[str, Any], flags: Mapping[str, Any]) -> None:

        self._source = ModelSource(name, name, config, "folder")
        self._sizer = Sizer(self._source)
        self._flags = Deployment(
            engine="vllm", gpu="cpu", device_memory=1 << 50, kv_cache_memory_bytes=vllm_versions.POOL,
            dtype="bfloat16", **flags,
        )  # fmt: skip

    def under(self, version: str) -> KVCachePlan:
        """Return the KV cache plan for ``version``."""
        return plan_source(self._source, replace(self._flags, engine_version=version), self._sizer).kv_cache


def score(inputs: Inputs) -> Section | None:
    """Return the scores of the table and of each version, for a CPU without AMX."""
    if inputs.configs is None or inputs.vllm is None:
        return None

    features = host.cpu_features
    without = frozenset(name for name in features() if not name.startswith("amx"))
    host.cpu_features = lambda: without
    try:
        return _score(inputs)
    finally:
        host.cpu_features = features


def _score(inputs: Inputs) -> Section:

    section = Section()
    for row in read_tsv(inputs.vllm, "config", "num_blocks", "tokens", "max_concurrency"):
        name = row["config"]
        config = inputs.config(name)
        if config is None:
            continue
        # The truth was recorded without weight quantization.
        config = {key: value for key, value in config.items() if key != "quantization_config"}
        try:
            cache = VersionPlans(name, config, {"max_model_len": 2048}).under("0.32.0")
        except TonnageError as error:
            section.refuse(name, error)
            continue
        truth = [int(row["num_blocks"]), int(row["tokens"]), float(row["max_concurrency"])]
        _add(section, name, [cache.num_blocks, cache.tokens, cache.max_concurrency], truth)
    section.extra["versions"] = versions()
    return section


def versions() -> dict[str, Any]:
    """Return the scores of every version: answered cases, equal plans, and the differences by name."""
    out: dict[str, Any] = {}
    features, host.cpu_features = host.cpu_features, vllm_versions.cpu_features
    try:
        for case, answers in vllm_versions.stored().items():
            config = vllm_versions.text_config(case)
            flags = vllm_versions.flags_of(case, config)
            planned = VersionPlans(
                case, config, {k: v for k, v in flags.items() if k != "kv_cache_memory_bytes"}
            )
            for version, truth in answers.items():
                if not isinstance(truth, list):
                    continue
                row = out.setdefault(version, {"rows": 0, "exact": 0, "misses": []})
                row["rows"] += 1
                try:
                    found = _found(planned.under(version))
                except TonnageError as error:
                    row["misses"].append(f"{case}: {error}")
                    continue
                theirs = _said(truth)
                if theirs[3] is None:
                    found[3] = None
                if found == theirs:
                    row["exact"] += 1
                else:
                    row["misses"].append(f"{case}: planned {found} truth {theirs}")
    finally:
        host.cpu_features = features
    return out


# Groups of both sides: layers and tokens per block. The block of a state group counts as 0, because vLLM only
# chooses with it where to keep a state.
def _found(cache: KVCachePlan) -> list[Any]:
    layout = cache.layout
    groups = sorted(
        [len(group.layers), 0 if group.kind == "state" else group.block_size or layout.block_size]
        for group in layout.groups
    )
    return [cache.num_blocks, cache.tokens, cache.max_concurrency, layout.bytes_per_block, groups]


def _said(answer: list[Any]) -> list[Any]:
    groups = answer[3]
    # The bytes of a block follow only from groups with one page size. For packed groups, num_blocks shows it.
    one = len({page for *_, page in groups}) == 1 and not groups[0][0].startswith("Uniform")
    whole = max(layers for _, layers, _, _ in groups) * groups[0][3] if one else None
    sizes = sorted([layers, 0 if spec == "MambaSpec" else size] for spec, layers, size, _ in groups)
    return [*answer[:3], whole, sizes]


def _add(section: Section, name: str, ours: list[Any], truth: list[Any]) -> None:
    section.rows += 1
    section.errors.append(max(abs(a - b) / b for a, b in zip(ours, truth, strict=True)))
    if ours == truth:
        section.exact += 1
    else:
        section.misses.append(f"{name}: planned {ours} truth {truth}")
