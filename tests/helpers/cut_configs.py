"""Public configs with a few layers, for vLLM to build on the meta device."""

from __future__ import annotations

import json
from pathlib import Path

CONFIGS = Path(__file__).parents[1] / "data" / "configs"


def cut(name: str, layers: int, changes: dict) -> dict:
    """Return a config reduced to ``layers`` layers, without quantization.

    Lists with one entry per layer are cut to the same length.
    """
    config = json.loads((CONFIGS / f"{name}.json").read_text())
    config = config.get("text_config", config)
    before = config["num_hidden_layers"]
    config = {key: value for key, value in config.items() if key != "quantization_config"}
    for key, value in config.items():
        if isinstance(value, list) and len(value) == before and key != "architectures":
            config[key] = value[:layers]
    if isinstance(config.get("hybrid_override_pattern"), str):
        config["hybrid_override_pattern"] = config["hybrid_override_pattern"][:layers]
    config.pop("auto_map", None)
    return {**config, "num_hidden_layers": layers, **changes}
