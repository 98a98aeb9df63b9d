"""The model architectures that the HF engine's paged attention serves, and why others are rejected.

An architecture qualifies (transformers 5.19.0) if every layer calls the registered attention function. It must
pass the current step's K and V and its keyword arguments. If other code of the model uses positions or masks,
its result for a token must not depend on other tokens. The self-check at start (``selfcheck``) verifies this
for the loaded model. ``Family.hf`` marks the reviewed families; other architectures are rejected before the
load. This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tonnage.planner.errors import UnsupportedArchitecture
from tonnage.planner.families.family import Paged
from tonnage.planner.families.registry import families, family_of

REASONS: dict[Paged, str] = {
    "unreviewed": "it is not on the reviewed list",
    "encoder-decoder": "it is an encoder-decoder model, and needs the encoder's run and a cache of "
    "cross-attention for each request",
    "encoder": "it is a bidirectional encoder, and has no KV cache",
    "latent": "MLA passes expanded K and V (71 times the latent), and needs a latent pool and kernels that "
    "absorb the projections",
    "recurrent": "its recurrent layers mix the sequences of a flat batch, and need a pool of states and a scan "
    "for each sequence",
    "own attention": "its attention does not go through the attention interface, and needs a port of its "
    "attention classes",
    "keywords lost": "its layers do not pass keyword arguments to attention",
    "routing": "in bfloat16 rounding makes its router choose other experts, which the self-check cannot tell "
    "from an error: it needs a check that follows the routing",
    "alibi": "it adds ALiBi inside its own attention, and needs a bias for each head in the kernels",
    "sinks": "its softmax has a sink for each head, which the kernels would have to add",
    "two attentions": "it takes the difference of two attentions, and needs both in one slot of the pool",
    "page sizes": "its layers share K and V or have two head sizes, and need pages of more than one size",
    "chunked masks": "its chunked masks are built for the whole batch, and need chunked windows in the layout",
}


def served() -> tuple[str, ...]:
    """Return the model types that the HF engine serves, each reviewed and tested.

    Tests run a tiny random model of each type (tests/server/test_hf_runner.py, test_hf_families.py). In float32
    the model generates the tokens that transformers' generate returns. In bfloat16 it passes the self-check.
    Its memory is as planned.
    """
    return tuple(sorted(name for name, family in families().items() if family.hf == "served"))


def require_supported(model_type: str) -> None:
    """Raise UnsupportedArchitecture if the Hugging Face engine does not serve models of type ``model_type``."""
    paged = family_of(model_type).hf
    if paged == "served":
        return
    raise UnsupportedArchitecture(
        f"{model_type!r} is not served by the hf backend: {REASONS[paged]}",
        field="model_type",
        hint=f"use --backend vllm, or one of {', '.join(served())}",
    )


def require_fixed_rotary(config: Mapping[str, Any], max_model_len: int) -> None:
    """Raise UnsupportedArchitecture if rotary frequencies would depend on other requests in the batch.

    transformers derives the frequencies of LongRoPE and dynamic NTK from the largest position in the whole
    batch (5.19, modeling_rope_utils.py, dynamic_rope_update). They are fixed if ``max_model_len`` is at most
    the model's original context length.
    """
    for name in ("rope_parameters", "rope_scaling"):
        found = config.get(name)
        if not isinstance(found, Mapping):
            continue
        tables = [value for value in found.values() if isinstance(value, Mapping)] or [found]
        for table in tables:
            kind = table.get("rope_type", table.get("type"))
            if kind not in ("longrope", "su", "dynamic"):
                continue
            original = config.get("max_position_embeddings")
            if kind != "dynamic":
                key = "original_max_position_embeddings"
                original = table.get(key, config.get(key))
            if not isinstance(original, int) or max_model_len > original:
                raise UnsupportedArchitecture(
                    f"{kind!r} picks its frequencies by the longest sequence of the batch: beyond the original "
                    f"context of {original} tokens answers would depend on other requests",
                    field=f"{name}.rope_type",
                    hint=f"--max-model-len {original}" if isinstance(original, int) else "use --backend vllm",
                )
