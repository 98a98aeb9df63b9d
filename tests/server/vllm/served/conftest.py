"""Fixtures of one plain vLLM and one server with the vLLM backend: the demo model with two adapters."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from honoured import FLAGS, TEMPLATE
from plain_vllm import LET_IT_START, plain_vllm
from serving import PATIENCE, ask_bare_vllm, serving
from shown import serve_lines
from vllm_demo import (
    ADAPTED,
    LENGTH,
    MAX_TOKENS,
    POOL,
    PROMPTS,
    RANK,
    SEQUENCES,
    SLOTS,
    SYSTEM,
    Bare,
    make_adapter,
)

from tonnage.server.demo.model import ensure_demo

# vLLM on its own, told nothing but the pool, the length and the slots; one prompt at a time.
BARE = """
import json, sys
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest
if __name__ == "__main__":
    folder, adapters, flags, prompts, adapted, max_tokens = json.loads(sys.argv[1])
    llm = LLM(folder, dtype="bfloat16", enforce_eager=True, enable_lora=True, **flags,
              worker_extension_cls="tonnage.server.engines.vllm.worker.WorkerExtension")
    greedy = SamplingParams(temperature=0, max_tokens=max_tokens)
    def ask(prompts, lora=None):
        return [llm.generate([p], greedy, lora_request=lora)[0].outputs[0].text for p in prompts]
    print("RESULT " + json.dumps({
        "texts": ask(prompts),
        "adapted": {n: ask(adapted, LoRARequest(n, i, p)) for i, (n, p) in enumerate(adapters.items(), 1)},
        "slots": sum(llm.collective_rpc("tonnage_lora_memory")),
        "blocks": llm.llm_engine.vllm_config.cache_config.num_gpu_blocks,
    }))
"""


@pytest.fixture(scope="package")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {name: make_adapter(folder / name, seed) for seed, name in enumerate(("first", "second"))}


@pytest.fixture(scope="package")
def bare(adapters: dict[str, Path]) -> Bare:
    flags = {
        "max_model_len": LENGTH, "kv_cache_memory_bytes": POOL, "max_loras": SLOTS, "max_lora_rank": RANK,
    }  # fmt: skip
    paths = {name: str(path) for name, path in adapters.items()}
    return Bare(**ask_bare_vllm(BARE, str(ensure_demo()), paths, flags, PROMPTS, ADAPTED, MAX_TOKENS))


@pytest.fixture(scope="package")
def kv_events(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the address at which the server publishes its KV events under the topic kv."""
    return f"ipc://{tmp_path_factory.mktemp('kv')}/events"


@pytest.fixture(scope="package")
def server(
    adapters: dict[str, Path], bare: Bare, kv_events: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """URL of a real server; after the bare one, so that two do not compete for the cores.

    Killed at the end: vLLM 0.32 leaves its engine core and that core's memory behind, we do not.
    """
    template = tmp_path_factory.mktemp("template") / "tools.jinja"
    template.write_text(TEMPLATE)
    system = template.with_name("system.txt")
    system.write_text(SYSTEM)
    events = {"enable_kv_cache_events": True, "endpoint": kv_events, "topic": "kv"}
    flags = [
        *("--chat-template", str(template), *FLAGS),
        *("--kv-cache-memory-bytes", str(POOL), "--max-model-len", str(LENGTH)),
        *("--max-num-seqs", str(SEQUENCES), "--enable-lora", "--max-loras", str(SLOTS)),
        *("--kv-events-config", json.dumps(events), "--shared-system-prompt", str(system)),
        *("--max-lora-rank", str(RANK), "--lora-modules"),
        ",".join(f"{name}={path}" for name, path in adapters.items()),
    ]
    # A minute without progress in tests is ten seconds.
    before = "from tonnage.server.engines import watchdog; watchdog.HANG_CHECKS = 10"
    with serving("demo", "--backend", "vllm", *flags, before=before, killed=True) as url:
        yield url


@pytest.fixture(scope="package")
def plain_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with the log of the plain vLLM."""
    return tmp_path_factory.mktemp("plain")


@pytest.fixture(scope="package")
def plain(plain_folder: Path) -> Iterator[str]:
    """Yield the URL of a plain ``vllm serve`` with our entry points and the longest command of docs/vllm.md.

    A few requests fill its pool, and a single request can be larger than it.
    """
    flags = ["--served-model-name", "demo", "--enforce-eager", "--max-model-len", "4096"]
    flags += ["--kv-cache-memory-bytes", "48M", "--max-num-seqs", "6", "--max-num-batched-tokens", "256"]
    flags += max(serve_lines(), key=len)[1:]
    with plain_vllm(plain_folder, str(ensure_demo()), *flags, before=LET_IT_START) as url:
        yield url


@pytest.fixture
def client(server: str) -> Iterator[openai.OpenAI]:
    with (
        httpx.Client(trust_env=False, timeout=PATIENCE) as http,
        openai.OpenAI(base_url=f"{server}/v1", api_key="unused", max_retries=0, http_client=http) as made,
    ):
        yield made
