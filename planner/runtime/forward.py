"""Peak of one plain transformers forward pass (no serving engine): what ``model(**inputs)`` holds at once.

Moments after transformers 4.57 / 5.x modeling code: the logits of every position beside the last hidden
states; the widest MLP; with eager attention the scores of one layer, which exist four times (the product, the
masked sum, their float32 softmax, and that in the model's dtype: eager_attention_forward). KV of all layers
stays.
"""

from __future__ import annotations

from tonnage.planner.architecture import Architecture
from tonnage.planner.dtypes import DTYPE_BYTES


def forward_peak(architecture: Architecture, batch: int, tokens: int, dtype: str, *, eager: bool) -> int:
    """Bytes beside the weights, ``batch`` sequences of ``tokens`` tokens."""
    size, rows = DTYPE_BYTES[dtype], batch * tokens
    cache = rows * size * sum(layer.elements_per_entry for layer in architecture.cache_layers)
    hidden = rows * architecture.hidden_size * size
    logits = rows * architecture.vocab_size * size + 2 * hidden
    mlp = rows * architecture.intermediate_size * (3 if architecture.gated_mlp else 2) * size + 3 * hidden
    attention = 0
    if eager:
        scores = batch * architecture.heads * tokens * tokens
        attention = scores * (3 * size + 4) + 3 * hidden
    return cache + max(logits, mlp, attention)
