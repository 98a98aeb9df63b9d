"""Which architectures the paged path serves, and why the known others are refused. Imports no torch.

transformers 5.19.0: an architecture qualifies when every layer calls the registered attention function with the
step's own K/V, hands keyword arguments down, and depends on positions and masks only token by token. The
self-check at start (:mod:`.selfcheck`) proves it for the model at hand; the list keeps surprises out.
"""

from __future__ import annotations

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
