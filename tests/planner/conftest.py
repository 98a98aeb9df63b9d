"""Fixtures of real configs and published figures (tests/data/configs; sources in SOURCES.tsv there)."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tonnage.planner.devices import host

CONFIGS = Path(__file__).parent.parent / "data" / "configs"


def table(name: str) -> list[dict[str, str]]:
    with (CONFIGS / name).open() as file:
        return list(csv.DictReader(file, delimiter="\t"))


@pytest.fixture(scope="session", autouse=True)
def cpu_of_stored_answers() -> Iterator[None]:
    """Plan for the CPU of vLLM's stored answers, which has AVX-512 with AVX512-BF16 and no AMX.

    With AMX its MLA has blocks of 128 tokens. Without AVX512-BF16 it keeps recurrent states in 16 bits.
    """
    features = frozenset(name for name in host.cpu_features() if not name.startswith("amx"))
    features |= {"avx512f", "avx512_bf16"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "cpu_features", lambda: features)
        yield


@pytest.fixture(scope="session")
def config_of():
    """Return a function that reads the config.json of "org/model" or "org__model" as a new dict."""

    def read(name: str) -> dict[str, Any]:
        return json.loads((CONFIGS / (name.replace("/", "__", 1) + ".json")).read_text())

    return read


@pytest.fixture
def folder_with(tmp_path):
    """Write a config (dict or raw bytes) into a new model folder and return its path."""

    def write(config: dict[str, Any] | bytes) -> str:
        data = config if isinstance(config, bytes) else json.dumps(config).encode()
        (tmp_path / "config.json").write_bytes(data)
        return str(tmp_path)

    return write


@pytest.fixture
def planner(config_of):
    """Return the training planner of Llama-3.1-8B."""
    from tonnage.planner.families.registry import build_architecture
    from tonnage.planner.training.build import Planner
    from tonnage.planner.training.model import model_from

    return Planner(model_from("llama", build_architecture(config_of("meta-llama/Meta-Llama-3.1-8B"))))


@pytest.fixture
def folder(folder_with, config_of):
    """Return a model folder with Llama-3.1-8B's config."""
    return folder_with(config_of("meta-llama/Meta-Llama-3.1-8B"))


@pytest.fixture
def tiny_llama() -> dict[str, Any]:
    """Return a complete small Llama config."""
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "dtype": "bfloat16",
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
    }


@pytest.fixture(scope="session")
def held_bytes():
    """Return a function that sums the bytes of all distinct storages reachable from a model's modules.

    It walks parameters, attributes of parameters (bitsandbytes' SCB and quant_state with its nested state),
    buffers and plain attributes of modules.
    """
    import torch

    def walk(value: Any, seen: dict[int, int], depth: int) -> None:
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            seen[storage.data_ptr()] = storage.nbytes()
        elif isinstance(value, dict):
            for item in value.values():
                walk(item, seen, depth)
        elif isinstance(value, list | tuple):
            for item in value:
                walk(item, seen, depth)
        elif type(value).__module__.startswith("bitsandbytes") and depth < 4:
            for item in vars(value).values():
                walk(item, seen, depth + 1)

    def held(model: Any) -> int:
        seen: dict[int, int] = {}
        for module in model.modules():
            for parameter in module.parameters(recurse=False):
                walk(parameter, seen, 0)
                walk(vars(parameter), seen, 0)
            for name, value in vars(module).items():
                if name not in ("_parameters", "_modules"):
                    walk(value, seen, 0)
        return sum(seen.values())

    return held


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize tests that use ``truth_row``, ``size_row`` or ``kv_row`` by the rows of that table."""
    for argument, name, key in (
        ("truth_row", "param_truth.tsv", "model"),
        ("size_row", "checkpoint_sizes.tsv", "model"),
        ("kv_row", "vllm_kv_truth.tsv", "config"),
    ):
        if argument in metafunc.fixturenames:
            rows = table(name)
            metafunc.parametrize(argument, rows, ids=[row[key] for row in rows])
