"""LoRA adapters behind vLLM on a CPU: routed by the model's name, equal to bare vLLM's greedy tokens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from safetensors.torch import save_file
from serving import BARE_ENVIRONMENT, PATIENCE, serving

from tonnage.planner.build import make_plan
from tonnage.planner.errors import DeploymentError
from tonnage.planner.plan import Deployment
from tonnage.server.commands.launch import make_engine
from tonnage.server.demo.model import ensure_demo
from tonnage.server.engines.lora import lora_modules
from tonnage.server.settings import Settings

needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed (extra vllm)")

POOL, LENGTH, RANK, SLOTS, MAX_TOKENS = 256 * 2**20, 1024, 8, 2, 16
PROMPTS = ["The capital of France is", "def fibonacci(n):"]
# SmolLM2-135M: hidden size 576, 30 layers, 3 KV heads of 64.
SHAPES = {"q_proj": (576, 576), "v_proj": (192, 576)}

# vLLM on its own: greedy answers without and with each adapter, and the bytes of its LoRA slots.
BARE = """
import json, sys
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest
if __name__ == "__main__":
    folder, adapters, flags, prompts, max_tokens = json.loads(sys.argv[1])
    llm = LLM(folder, dtype="bfloat16", enforce_eager=True, enable_lora=True, **flags,
              worker_extension_cls="tonnage.server.engines.vllm.worker.WorkerExtension")
    greedy = SamplingParams(temperature=0, max_tokens=max_tokens)
    loras = {"demo": None} | {n: LoRARequest(n, i, p) for i, (n, p) in enumerate(adapters.items(), 1)}
    texts = {n: [llm.generate([p], greedy, lora_request=l)[0].outputs[0].text for p in prompts]
             for n, l in loras.items()}
    print("RESULT " + json.dumps({"texts": texts, "slots": sum(llm.collective_rpc("tonnage_lora_memory"))}))
"""


def make_adapter(folder: Path, seed: int, *, rank: int = RANK) -> Path:
    """A random adapter of the demo model in PEFT's format."""
    draw = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(30):
        for name, (out, into) in SHAPES.items():
            stem = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{stem}.lora_A.weight"] = torch.randn(rank, into, generator=draw) / into**0.5
            tensors[f"{stem}.lora_B.weight"] = torch.randn(out, rank, generator=draw) * 0.2
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 16, "lora_dropout": 0.0,
        "bias": "none", "target_modules": list(SHAPES), "base_model_name_or_path": "demo",
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {name: make_adapter(folder / name, seed) for seed, name in enumerate(("first", "second"))}


@pytest.fixture(scope="module")
def bare(adapters: dict[str, Path]) -> dict[str, Any]:
    flags = {
        "max_model_len": LENGTH, "kv_cache_memory_bytes": POOL, "max_loras": SLOTS, "max_lora_rank": RANK,
    }  # fmt: skip
    paths = {name: str(path) for name, path in adapters.items()}
    done = subprocess.run(
        [sys.executable, "-c", BARE, json.dumps([str(ensure_demo()), paths, flags, PROMPTS, MAX_TOKENS])],
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE,
        env=os.environ | BARE_ENVIRONMENT,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stdout[-2000:] + done.stderr[-4000:]
    result: dict[str, Any] = json.loads(lines[0].removeprefix("RESULT "))
    return result


@pytest.fixture(scope="module")
def client(adapters: dict[str, Path], bare: dict[str, Any]) -> Iterator[openai.OpenAI]:
    """The server, after bare vLLM: two would compete for the cores."""
    flags = [
        *("--kv-cache-memory-bytes", str(POOL), "--max-model-len", str(LENGTH), "--max-num-seqs", "8"),
        *("--enable-lora", "--max-loras", str(SLOTS), "--max-lora-rank", str(RANK), "--lora-modules"),
        ",".join(f"{name}={path}" for name, path in adapters.items()),
    ]
    with (
        serving("demo", "--backend", "vllm", *flags) as url,
        httpx.Client(trust_env=False, timeout=PATIENCE) as http,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=http) as made,
    ):
        yield made


@needs_vllm
def test_each_name_has_its_adapter(client: openai.OpenAI, bare: dict[str, Any]) -> None:
    names = list(bare["texts"])
    models = {model.id: model for model in client.models.list().data}
    assert list(models) == names
    assert models["first"].model_dump()["parent"] == "demo"
    assert client.models.retrieve("second").id == "second"

    def ask(name: str, prompt: str) -> str:
        answer = client.completions.create(model=name, prompt=prompt, temperature=0, max_tokens=MAX_TOKENS)
        assert answer.model == name
        return answer.choices[0].text

    # The same prompts one after the other: blocks cached for one adapter are not another's.
    found = {name: [ask(name, prompt) for prompt in PROMPTS] for name in names}
    assert found == bare["texts"]
    assert len({tuple(texts) for texts in found.values()}) == len(names), "an adapter changed nothing"
    with ThreadPoolExecutor(6) as pool:  # in one batch, more of them than slots
        assert all(pool.map(lambda name: ask(name, "One, two,"), names * 3))
    chat = client.chat.completions.create(
        model="first", messages=[{"role": "user", "content": "Hi"}], max_tokens=4, stream=True
    )
    assert {chunk.model for chunk in chat} == {"first"}
    with pytest.raises(openai.NotFoundError, match="'demo', 'first', 'second'"):
        ask("third", "x")


@needs_vllm
def test_memory_shows_the_slots_beside_their_plan(client: openai.OpenAI, bare: dict[str, Any]) -> None:
    with httpx.Client(trust_env=False, timeout=30, base_url=str(client.base_url).removesuffix("v1/")) as http:
        report = http.get("/memory").json()
    assert report["measured"]["lora_bytes"] == report["plan"]["ranks"][0]["lora_bytes"] == bare["slots"]
    assert report["difference"]["lora_bytes"] == 0


@needs_vllm
def test_the_plan_counts_the_slots(bare: dict[str, Any]) -> None:
    deployment = Deployment(
        engine="vllm", kv_cache_memory_bytes=POOL, enable_lora=True, max_loras=SLOTS, max_lora_rank=RANK
    )
    assert make_plan("demo", deployment).rank.lora_bytes == bare["slots"]


def test_what_is_refused_before_the_start(tmp_path: Path) -> None:
    good = make_adapter(tmp_path / "good", 0)
    for given, message in (
        (["good"], "name=path"),
        ([f"a={tmp_path}"], "adapter_model.safetensors"),
        ([f"a={good}", f"a={good}"], "names two models"),
        ([f"demo={good}"], "names two models"),
    ):
        with pytest.raises(DeploymentError, match=message):
            lora_modules(given, "demo", RANK)
    with pytest.raises(DeploymentError, match=f"rank {RANK}, the slots 4.*--max-lora-rank {RANK}"):
        lora_modules([f"a={good}"], "demo", 4)
    (good / "adapter_config.json").unlink()
    with pytest.raises(DeploymentError, match="rank r"):
        lora_modules([f"a={good}"], "demo", RANK)
    plan = make_plan("demo", Deployment(kv_cache_memory_bytes=POOL))
    with pytest.raises(DeploymentError, match="--enable-lora"):
        make_engine(Settings(model="demo", backend="vllm", lora_modules=(f"a={good}",)), plan)
    for backend in ("hf", "fake"):
        with pytest.raises(DeploymentError, match="--backend vllm"):
            make_engine(Settings(model="demo", backend=backend, enable_lora=True), plan)
