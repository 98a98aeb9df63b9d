"""Which architectures the paged path serves, and why the known others are refused. Imports no torch.

transformers 5.19.0: an architecture qualifies when every layer calls the registered attention function with the
step's own K/V, hands keyword arguments down, and depends on positions and masks only token by token. The
self-check at start (:mod:`.selfcheck`) proves it for the model at hand; the list keeps surprises out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tonnage.planner.errors import UnsupportedArchitecture

ALLOWED = frozenset(
    {"llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "gpt_neox", "gpt_bigcode"}
)

REFUSED = {
    "falcon": "its attention classes are looked up by name and raise on a registered function",
    "mpt": "its attention does not go through the attention interface",
    "bloom": "it never calls the attention interface (ALiBi is added inside its own attention)",
    "qwen3_next": "its linear-attention layers mix the sequences of a flat batch",
    "llama4": "its chunked masks are built for the whole batch",
    "llama4_text": "its chunked masks are built for the whole batch",
    "phi3": "LongRoPE picks its frequencies by the longest sequence of the batch",
    "deepseek_v2": "MLA hands over expanded K and V (71x the latent); a latent pool does not exist yet",
    "deepseek_v3": "MLA hands over expanded K and V (71x the latent); a latent pool does not exist yet",
}


def require_supported(model_type: str) -> None:
    """Raise UnsupportedArchitecture unless the Hugging Face engine serves this ``model_type``."""
    if model_type in ALLOWED:
        return
    reason = REFUSED.get(model_type, "it is not on the reviewed list")
    raise UnsupportedArchitecture(
        f"{model_type!r} is not served by the hf backend: {reason}",
        field="model_type",
        hint=f"use --backend vllm, or one of {', '.join(sorted(ALLOWED))}",
    )


def require_fixed_rotary(config: Mapping[str, Any], max_model_len: int) -> None:
    """Raise UnsupportedArchitecture where rotary frequencies would depend on what else is in the batch.

    transformers takes LongRoPE's and dynamic NTK's frequencies from the largest position of the whole forward
    (5.19, modeling_rope_utils.py dynamic_rope_update): up to the original context they are the same for all.
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
