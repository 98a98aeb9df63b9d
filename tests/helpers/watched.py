"""Recorded pages of vLLM, llama.cpp and SGLang (tests/data/SOURCES.md) as servers, and one look at one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pages import Pages, Stored, pages, recorded

from tonnage.server.watch.client import Client
from tonnage.server.watch.watcher import Observation, Watcher

VLLM, LLAMA, SGLANG = "vllm-0.32.0", "llama.cpp-0.3.36", "sglang"
QWEN = Path(__file__).resolve().parent.parent / "data" / "configs" / "Qwen__Qwen2.5-0.5B.json"


def vllm(name: str = "full", **more: str | Stored) -> Any:
    return pages(
        metrics=recorded(VLLM, f"metrics_{name}.txt"),
        v1_models=recorded(VLLM, "models.json"),
        version=recorded(VLLM, "version.json"),
        **more,
    )


def llama(kind: str, name: str) -> Any:
    return pages(
        metrics=Stored(recorded(LLAMA, f"metrics_{kind}_{name}.txt"), headers={"Process-Start-Time-Unix": "1"}),
        props=recorded(LLAMA, f"props_{kind}.json"),
        v1_models=recorded(LLAMA, "models.json"),
        slots=recorded(LLAMA, f"slots_{kind}_{name}.json"),
    )


def sglang(release: str = "0.5", **more: str) -> Any:
    return pages(
        metrics=recorded(SGLANG, f"metrics_{release}.txt"),
        server_info=recorded(SGLANG, "server_info.json"),
        **more,
    )


def look(
    server: Pages, model: str | None = None, *, kv_unified: bool | None = None, **flags: Any
) -> Observation:
    return Watcher(Client(server.url), flags, model, kv_unified=kv_unified).observe()
