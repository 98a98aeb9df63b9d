"""Tests of LoRA adapters behind vLLM on a CPU: selected by model name, with plain vLLM's greedy tokens."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import httpx
import openai
import pytest
from serving import PATIENCE
from vllm_demo import ADAPTED, MAX_TOKENS, POOL, RANK, SLOTS, Bare, make_adapter

from tonnage.planner.deployment import Deployment
from tonnage.planner.errors import DeploymentError
from tonnage.planner.planning.build import make_plan
from tonnage.server.commands.launch import make_engine
from tonnage.server.engines.lora import lora_modules
from tonnage.server.settings import Settings

needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed (extra vllm)")


@needs_vllm
def test_each_lora_adapter_name_generates_with_its_own_adapter(client: openai.OpenAI, bare: Bare) -> None:
    names = ["demo", *bare.adapted]
    models = {model.id: model for model in client.models.list().data}
    assert list(models) == names
    assert models["first"].model_dump()["parent"] == "demo"
    assert client.models.retrieve("second").id == "second"

    def ask(name: str, prompt: str) -> str:
        answer = client.completions.create(model=name, prompt=prompt, temperature=0, max_tokens=MAX_TOKENS)
        assert answer.model == name
        return answer.choices[0].text

    # The same prompts one after the other: blocks cached for one adapter are not another's.
    found = {name: [ask(name, prompt) for prompt in ADAPTED] for name in names}
    assert found == bare.adapted | {"demo": bare.texts[::2]}
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
def test_memory_endpoint_reports_planned_and_measured_bytes_of_lora_slots(
    client: openai.OpenAI, bare: Bare
) -> None:
    with httpx.Client(
        trust_env=False, timeout=PATIENCE, base_url=str(client.base_url).removesuffix("v1/")
    ) as http:
        report = http.get("/memory").json()
    assert report["measured"]["lora_bytes"] == report["plan"]["ranks"][0]["lora_bytes"] == bare.slots
    assert report["difference"]["lora_bytes"] == 0


@needs_vllm
def test_plan_includes_the_bytes_of_lora_slots(bare: Bare) -> None:
    deployment = Deployment(
        engine="vllm", kv_cache_memory_bytes=POOL, enable_lora=True, max_loras=SLOTS, max_lora_rank=RANK
    )
    assert make_plan("demo", deployment).rank.lora_bytes == bare.slots


def test_invalid_lora_adapters_are_rejected_before_the_start(tmp_path: Path) -> None:
    good = make_adapter(tmp_path / "good", 0)
    for given, message in (
        (["good"], "name=path"),
        ([f"a={tmp_path}"], "adapter_model.safetensors"),
        ([f"a={good}", f"a={good}"], "is used twice"),
        ([f"demo={good}"], "is used twice"),
    ):
        with pytest.raises(DeploymentError, match=message):
            lora_modules(given, "demo", RANK)
    with pytest.raises(DeploymentError, match=f"rank {RANK}; the adapter slots .*--max-lora-rank {RANK}"):
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
