"""``kv``: bytes one sequence of 32,768 tokens keeps (16-bit), for every real config of the folder, against the
oracle of kv_oracle.py, and layer kinds and page bytes against vLLM's own specs where they are given."""

from __future__ import annotations

import json

from accuracy import kv_oracle
from accuracy.common import Inputs, Section, read_tsv

NAME = "kv"
TOKENS = 32_768
_SPECS = {
    "FullAttentionSpec": "full",
    "SlidingWindowSpec": "sliding",
    "MLAAttentionSpec": "mla",
    "MambaSpec": "state",
}


def score(inputs: Inputs) -> Section | None:
    from tonnage.planner.cache_bytes import sequence_bytes
    from tonnage.planner.errors import TonnageError
    from tonnage.planner.families.registry import build_architecture

    if inputs.configs is None:
        return None
    section = Section()
    unknown = []
    for name in inputs.names():
        if name.startswith("transformers-default"):
            continue
        config = inputs.config(name)
        if config is None:
            continue
        try:
            planned = sequence_bytes(build_architecture(config), TOKENS, "bfloat16")
        except TonnageError as error:
            section.refuse(name, error)
            continue
        try:
            truth = kv_oracle.expected(config, TOKENS)
        except (KeyError, TypeError):  # a field that the oracle, unlike the planner, wants in the file
            truth = None
        if truth is None:
            unknown.append(name)
            continue
        section.add(name, planned.growing + planned.fixed, sum(truth))
    section.extra["not_in_the_oracle"] = unknown
    if inputs.vllm is not None:
        section.extra["vllm_specs"] = _against_vllm(inputs)
    return section


def _against_vllm(inputs: Inputs) -> dict[str, object]:
    """Layers per kind, as vLLM registers them (an engine that expands latents says full)."""
    from tonnage.planner.errors import TonnageError
    from tonnage.planner.families.registry import build_architecture

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
