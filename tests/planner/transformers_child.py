"""Print what the first importable transformers builds of configs on the meta device.

That is its parameters, its buffers, and the DynamicCache after a forward pass over 8 tokens. It reads a list of
configs from standard input and prints a line ``RESULT {...}`` for each. test_families_new.py runs it.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import transformers
from transformers import DynamicCache
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

TOKENS = 8


def shape_of(tensor: torch.Tensor) -> list[Any]:
    """Return [*sizes, dtype] of a tensor."""
    return [*tensor.shape, str(tensor.dtype).removeprefix("torch.")]


def cached(model: Any, config: Any) -> list[Any]:
    """Return for each cache layer its class and its tensors by attribute."""
    cache = DynamicCache(config=config)
    with torch.no_grad():
        model(
            input_ids=torch.zeros((1, TOKENS), dtype=torch.long, device="meta"), past_key_values=cache,
            use_cache=True,
        )  # fmt: skip
    out = []
    for layer in cache.layers:
        held: dict[str, Any] = {}
        for name, value in vars(layer).items():
            values = (
                value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]
            )
            shapes = [shape_of(v) for v in values if isinstance(v, torch.Tensor)]
            if shapes:
                held[name] = shapes
        out.append([type(layer).__name__, getattr(layer, "sliding_window", None), held])
    return out


def answer(asked: dict[str, Any]) -> dict[str, Any]:
    given = {k: v for k, v in asked["config"].items() if k not in ("model_type", "architectures")}
    config = CONFIG_MAPPING[asked["config"]["model_type"]](**given)
    with torch.device("meta"):
        model = getattr(transformers, asked["class"])._from_config(config, dtype=torch.bfloat16)
    model.eval()
    says: dict[str, Any] = {"parameters": sum(p.numel() for p in model.parameters())}
    if not asked["whole"]:  # the class's default sizes
        written = json.loads(config.to_json_string(use_diff=False))
        says["config"] = {**written, "architectures": [asked["class"]]}
    if asked["whole"]:
        keep = tuple(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
        named = dict(model.named_parameters(remove_duplicate=False))
        says["shapes"] = {n: list(p.shape) for n, p in named.items()}
        buffers = dict(model.named_buffers())
        says["buffers"] = {n: shape_of(b) for n, b in buffers.items()}
        says["stored"] = sorted(set(model.state_dict()) - set(named))
        says["float32"] = sorted(keep)
        text = config.get_text_config()
        says["cache"] = cached(model, text)
    return says


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    for case in json.load(sys.stdin):
        print("RESULT", json.dumps(answer(case)), flush=True)
