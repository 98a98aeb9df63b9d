"""Section ``kv``: cache bytes of one sequence of 32,768 tokens (16-bit) in vLLM's plan of every real config.

The truth is kv_oracle.py. ``layers`` compares the same of the layers from which plans are made, recurrent
states included. ``vllm_specs`` compares layer kinds with vLLM's own specs, where they are given.
"""

from __future__ import annotations

import json

from accuracy import kv_bytes, kv_oracle
from accuracy.common import Inputs, Section, read_tsv
from tonnage.planner.deployment import Deployment
from tonnage.planner.errors import TonnageError
from tonnage.planner.families.registry import build_architecture
from tonnage.planner.planning.build import plan_source
from tonnage.planner.source.resolve import ModelSource

NAME = "kv"
TOKENS = 32_768
_SPECS = {
    "FullAttentionSpec": "full",
    "SlidingWindowSpec": "sliding",
    "MLAAttentionSpec": "mla",
    "MambaSpec": "state",
}


def score(inputs: Inputs) -> Section | None:
    """Return the scores of the section, or None without configs."""
    if inputs.configs is None:
        return None
    # The device fits any model. The length decides how many blocks a sequence has, and not their content.
    flags = Deployment(
        engine="vllm", dtype="bfloat16", max_model_len=512, kv_cache_memory_bytes=1 << 33, device_memory=1 << 44
    )  # fmt: skip
    section = Section()
    unknown, elsewhere, layers = [], [], []
    for name in inputs.names():
        if name.startswith("transformers-default"):
            continue
        config = inputs.config(name)
        if config is None:
            continue
        try:
            architecture = build_architecture(config)
            plain = {key: value for key, value in config.items() if key != "quantization_config"}
            plan = plan_source(ModelSource(name, name, plain, "folder"), flags)
        except TonnageError as error:
            section.refuse(name, error)
            continue
        try:
            truth = kv_oracle.expected(config, TOKENS)
            growing = kv_oracle.expected(config, TOKENS, kv_oracle.vllm_index_bytes)
        except (KeyError, TypeError):  # a field that the oracle requires and the planner does not
            truth = growing = None
        if truth is None or growing is None:
            unknown.append(name)
            continue
        found = kv_bytes.by_layers(architecture, TOKENS)
        if found != truth:
            layers.append(f"{name}: {found} truth {truth}")
        if architecture.model_type in kv_bytes.OWN_LAYOUT:
            elsewhere.append(name)
        else:
            section.add(name, kv_bytes.by_plan(plan, TOKENS), growing[0])
    compared = len(section.errors) + len(elsewhere)
    section.extra["not_in_the_oracle"] = unknown
    section.extra["held_against_vllm_itself"] = elsewhere
    section.extra["layers"] = {"rows": compared, "equal": compared - len(layers), "differ": layers}
    if inputs.vllm is not None:
        section.extra["vllm_specs"] = _against_vllm(inputs)
    return section


def _against_vllm(inputs: Inputs) -> dict[str, object]:
    """Compare the layers per kind with vLLM's own specs; an engine that expands latents reports full."""
    equal, differ = 0, []
    for row in read_tsv(inputs.vllm, "config") if inputs.vllm else []:
        config = inputs.config(row["config"])
        groups = row["groups (spec, layers, block_size, page_bytes)"]
        if config is None or not groups:
            continue
        counts: dict[str, int] = {}
        for spec, layers, *_ in json.loads(groups):
            kind = _SPECS.get(spec, spec)
            counts[kind] = counts.get(kind, 0) + layers
        try:
            cached = build_architecture(config).cache_layers
        except TonnageError as error:
            differ.append(f"{row['config']}: {error}")
            continue
        own: dict[str, int] = {}
        for layer in cached:
            own[layer.kind] = own.get(layer.kind, 0) + 1
        if own == counts:
            equal += 1
        else:
            differ.append(f"{row['config']}: planned {own} vLLM {counts}")
    return {"rows": equal + len(differ), "equal": equal, "differ": differ}
