"""What a client can meet on the real engines: every kind of refusal, and an overload that adds up.

hf serves the demo model, vLLM a GPTQ copy of it (its weights rounded here), so that the same start also shows
a quantized checkpoint behind vLLM: pool, weights and greedy tokens. That a kill of an engine is told at once,
also to open streams, is in test_supervision and vllm/served/test_engine.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import httpx
import instructor
import openai
import psutil
import pydantic
import pytest
import torch
from safetensors.torch import load_file, save_file
from serving import PATIENCE, ask_bare_vllm

from tonnage.planner.devices.host import cpu_features
from tonnage.server.demo.model import ensure_demo

KEY = "a-key-of-both-engines"
LENGTH, QUEUE, SECONDS = 896, 16, 15
# 31 blocks for requests: one of LENGTH tokens takes 28, OVERLOAD takes 16 x 3,
# the third block of each within a few steps, so that SECONDS is enough on a busy machine.
BLOCKS, BLOCK_SIZE, BLOCK_BYTES = 32, 32, 32 * 30 * 2 * 3 * 64 * 2
FLAGS = [
    *("--max-model-len", str(LENGTH), "--max-num-seqs", "16", "--block-size", str(BLOCK_SIZE)),
    *("--kv-cache-memory-bytes", str(BLOCKS * BLOCK_BYTES), "--max-num-queued-reqs", str(QUEUE)),
    *("--request-timeout", str(SECONDS), "--max-request-body-bytes", "100000", "--port", "0"),
    *("--served-model-name", "demo"),
]
PROMPTS = ["The capital of France is", "Once upon a time there was a fox who", "One, two, three,"]
MAX_TOKENS, OVERLOAD, OVERLOAD_TOKENS = 20, [[number] + [5] * 59 for number in range(100, 116)], 8

# -- a GPTQ checkpoint of the demo model ---------------------------------------------------------------------

BITS, GROUP = 4, 64


def packed(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """(out, in) as GPTQ's tensors, rounded to the nearest of 15 values in each group of 64 inputs."""
    columns, rows = weight.shape
    groups = weight.float().t().reshape(rows // GROUP, GROUP, columns)
    scales = (groups.abs().amax(1) / 7).clamp_min(1e-8).half()
    values = (torch.round(groups / scales.float()[:, None]) + 8).to(torch.int32).reshape(rows, columns)
    shifts = torch.arange(0, 32, BITS, dtype=torch.int32)
    zeros = torch.full((rows // GROUP, columns // 8, 8), 7, dtype=torch.int32)  # stored minus one
    return {
        "qweight": (values.reshape(rows // 8, 8, columns) << shifts[:, None]).sum(1, dtype=torch.int32),
        "qzeros": (zeros << shifts).sum(-1, dtype=torch.int32),
        "scales": scales,
        "g_idx": torch.arange(rows, dtype=torch.int32) // GROUP,
    }


@pytest.fixture(scope="module")
def gptq(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the demo model in GPTQ's format."""
    demo, folder = ensure_demo(), tmp_path_factory.mktemp("gptq")
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(demo / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            stem = name.removesuffix("weight")
            tensors |= {stem + part: value.contiguous() for part, value in packed(tensor).items()}
        else:
            tensors[name] = tensor
    for file in demo.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "gptq", "bits": BITS, "group_size": GROUP, "desc_act": False, "sym": True,
        "checkpoint_format": "gptq",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


# -- the servers, each started once --------------------------------------------------------------------------


@dataclass
class Served:
    """A server of another process. ``loading``: what it answered before the model was there."""

    url: str
    loading: httpx.Response
    alive: httpx.Response

    def client(self, key: str | None = KEY) -> httpx.AsyncClient:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return httpx.AsyncClient(base_url=self.url, headers=headers, trust_env=False, timeout=PATIENCE)

    def metric(self, name: str) -> float:
        headers = {"authorization": f"Bearer {KEY}"}
        page = httpx.get(f"{self.url}/metrics", headers=headers, trust_env=False, timeout=PATIENCE)
        lines = [line for line in page.text.splitlines() if line.startswith(name)]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def completion(**more: Any) -> dict[str, Any]:
    return {"model": "demo", "prompt": "hello", "max_tokens": 2} | more


def start(model: str, *flags: str) -> Iterator[Served]:
    command = [sys.executable, "-m", "tonnage.server.cli", "serve", model, *FLAGS, *flags]
    environment = os.environ | {"TONNAGE_API_KEY": KEY}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    headers = {"authorization": f"Bearer {KEY}"}
    try:
        lines = iter(process.stdout)
        url = next(line.split()[-1] for line in lines if line.startswith("listening on "))
        alive = httpx.get(f"{url}/health", trust_env=False, timeout=PATIENCE)
        loading = httpx.post(
            f"{url}/v1/completions", json=completion(), headers=headers, trust_env=False, timeout=PATIENCE
        )
        assert any(line.startswith("ready on ") for line in lines), "the server ended before it was ready"
        threading.Thread(target=process.stdout.read, daemon=True).start()
        yield Served(url, loading, alive)
    finally:
        family = psutil.Process(process.pid).children(recursive=True)
        process.terminate()
        process.communicate(timeout=PATIENCE)
    _, left = psutil.wait_procs(family, timeout=PATIENCE)
    assert (process.returncode, left) == (0, [])


@pytest.fixture(scope="module")
def hf() -> Iterator[Served]:
    yield from start("demo", "--backend", "hf")


# vLLM on its own with the same flags: greedy answers, its blocks, and its preemptions under OVERLOAD.
BARE = """
import json, sys
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    folder, flags, prompts, max_tokens, overload, overload_tokens = json.loads(sys.argv[1])
    llm = LLM(folder, dtype="bfloat16", enforce_eager=True, disable_log_stats=False, **flags)
    greedy = SamplingParams(temperature=0, max_tokens=max_tokens)
    texts = [llm.generate([prompt], greedy)[0].outputs[0].text for prompt in prompts]
    llm.generate([{"prompt_token_ids": ids} for ids in overload],
                 SamplingParams(temperature=0, max_tokens=overload_tokens, ignore_eos=True))
    preemptions = [m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions"]
    blocks = llm.llm_engine.vllm_config.cache_config.num_gpu_blocks
    print("RESULT " + json.dumps({"texts": texts, "blocks": blocks, "preemptions": sum(preemptions)}))
"""


@pytest.fixture(scope="module")
def bare(gptq: Path) -> dict[str, Any]:
    if "avx512f" not in cpu_features():
        pytest.skip("vLLM 0.32 has its CPU kernel for GPTQ (cpu_gemm_wna16) only in the builds for AVX-512")
    flags = {
        "max_model_len": LENGTH,
        "max_num_seqs": 16,
        "block_size": BLOCK_SIZE,
        "kv_cache_memory_bytes": BLOCKS * BLOCK_BYTES,
    }
    return ask_bare_vllm(BARE, str(gptq), flags, PROMPTS, MAX_TOKENS, OVERLOAD, OVERLOAD_TOKENS)


@pytest.fixture(scope="module")
def vllm(gptq: Path, bare: dict[str, Any]) -> Iterator[Served]:
    """After the bare one, so that two do not compete for the cores."""
    yield from start(str(gptq), "--backend", "vllm")


needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed (extra vllm)")


@pytest.fixture(params=["hf", pytest.param("vllm", marks=needs_vllm)])
def served(request: pytest.FixtureRequest) -> Served:
    found: Served = request.getfixturevalue(request.param)
    return found


# -- every row of the error table ----------------------------------------------------------------------------

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = {"model": "demo", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
LONG: list[int] = [5] * LENGTH
JSON = {"content-type": "application/json"}

# (request, status, code, param)
ROWS: dict[str, tuple[dict[str, Any], int, str, str | None]] = {
    "prompt too long": ({"json": completion(prompt=LONG)}, 400, "context_length_exceeded", "prompt"),
    "prompt and answer too long": (
        {"json": completion(prompt=LONG[:800], max_tokens=100)}, 400, "context_length_exceeded", "max_tokens",
    ),
    "too long for chat": (
        {"url": CHAT, "json": HELLO | {"max_tokens": 10**6}}, 400, "context_length_exceeded", "max_tokens",
    ),
    "larger than the pool": (
        {"json": completion(prompt=LONG[:8], max_tokens=800, n=2)}, 400, "exceeds_kv_capacity", "prompt",
    ),
    "no JSON": ({"content": b"{", "headers": JSON}, 400, "invalid_json", None),
    "raw bytes": ({"content": b"\x80\xfe", "headers": JSON}, 400, "invalid_encoding", None),
    "content type": ({"content": b"a=1", "headers": {"content-type": "text/plain"}}, 415,
                     "unsupported_media_type", None),
    "too large": ({"json": completion(prompt="a" * 100_000)}, 413, "request_too_large", None),
    "unknown model": ({"json": completion(model="gpt-4")}, 404, "model_not_found", "model"),
    "missing field": ({"json": {"model": "demo"}}, 400, "missing_required_parameter", "prompt"),
    "field type": ({"json": completion(max_tokens="5")}, 400, "invalid_type", "max_tokens"),
    "field range": ({"json": completion(temperature=9)}, 400, "invalid_value", "temperature"),
    "range of a token id": ({"json": completion(prompt=[10**6])}, 400, "invalid_value", "prompt"),
    "unknown field": ({"json": completion(foo=1)}, 400, "unknown_parameter", "foo"),
    "unsupported field": ({"json": completion(use_beam_search=True)}, 400, "unsupported_parameter",
                          "use_beam_search"),
    "tools without a parser": (
        {"url": CHAT, "json": HELLO | {"tools": [{"type": "function", "function": {"name": "f"}}]}}, 400,
        "unsupported_parameter", "tools",
    ),
    "embeddings": ({"url": "/v1/embeddings", "json": {"model": "demo", "input": "a"}}, 400,
                   "unsupported_endpoint", "model"),
    "unknown route": ({"url": "/v1/nope", "json": {}}, 404, "unknown_url", None),
    "unknown model route": ({"method": "GET", "url": "/v1/models/gpt-4"}, 404, "model_not_found", "model"),
    "method": ({"method": "GET", "url": COMPLETIONS}, 405, "method_not_allowed", None),
}  # fmt: skip


async def test_invalid_requests_get_equal_errors_on_every_engine(served: Served, checked: Any) -> None:
    async with served.client() as http:
        for name, (request, status, code, param) in ROWS.items():
            wishes = [request]
            if isinstance(request.get("json"), dict) and "max_tokens" in request["json"]:
                wishes.append(request | {"json": request["json"] | {"stream": True}})
            for wish in wishes:
                response = await http.request(**({"method": "POST", "url": COMPLETIONS} | wish))
                error = checked(response)
                assert (response.status_code, error.code, error.param) == (status, code, param), name
        good = await http.post(COMPLETIONS, json=completion())
        assert good.status_code == 200


async def test_server_is_live_but_not_ready_while_the_model_loads(served: Served, checked: Any) -> None:
    assert served.alive.status_code == 200
    assert checked(served.loading).code == "model_loading"


async def test_all_routes_except_the_probes_require_a_valid_key(served: Served, checked: Any) -> None:
    for key in (None, "wrong"):
        async with served.client(key) as http:
            for path in (COMPLETIONS, "/tokenize", "/metrics", "/memory", "/docs", "/v1/models", "/nope"):
                response = await http.post(path, json={})
                assert checked(response).code == "invalid_api_key"
                assert response.headers["www-authenticate"] == "Bearer"
            assert {(await http.get(path)).status_code for path in ("/health", "/ready")} == {200}


async def test_request_to_a_server_with_a_full_queue_gets_retry_after(served: Served, checked: Any) -> None:
    async with served.client() as http:
        body = completion(prompt=["a"] * QUEUE, max_tokens=800, ignore_eos=True, stream=True)
        async with http.stream("POST", COMPLETIONS, json=body) as stream:
            lines = stream.aiter_lines()  # held: one that is dropped closes the stream
            await anext(lines)
            for more in ({}, {"stream": True}):
                assert (
                    checked(await http.post(COMPLETIONS, json=completion(**more))).code == "server_overloaded"
                )
        # The client has left: its sixteen places are free, and it is counted.
        async with asyncio.timeout(PATIENCE):
            while (await http.get("/load")).json()["server_load"]:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert served.metric('tonnage_requests_total{model="demo",outcome="aborted"}') >= 1
        assert (await http.post(COMPLETIONS, json=completion())).status_code == 200


async def test_every_received_request_is_counted_with_one_outcome_under_overload(
    served: Served, overload: Any
) -> None:
    outcomes = await overload(served.url, rounds=2, key=KEY, slow_tokens=800)
    for outcome in ("length", "aborted", "rejected"):
        assert outcomes[outcome] > 0
    assert outcomes["error"] == 0
    # Told to the clients: no room for now, no time left (in a stream, after its first chunks, or before).
    assert outcomes["server_overloaded"] > 0
    assert outcomes.get("request_timeout", 0) + outcomes.get("queue_timeout", 0) > 0
    assert served.metric("tonnage_preemptions_total{") == 0


# -- a client that wants JSON ---------------------------------------------------------------------------------


class City(pydantic.BaseModel):
    """What instructor asks for. Short, so that a small model gets to the end."""

    name: Literal["Paris", "Rome"]
    capital: bool


async def test_instructor_receives_the_requested_pydantic_model(served: Served) -> None:
    async with openai.AsyncOpenAI(
        base_url=f"{served.url}/v1", api_key=KEY, max_retries=0, http_client=served.client()
    ) as sdk:
        client = instructor.from_openai(sdk, mode=instructor.Mode.JSON_SCHEMA)
        city = await client.chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": "Name a capital as JSON."}],
            response_model=City,
            max_retries=0,
            max_tokens=60,
            temperature=0,
        )
    assert isinstance(city, City)


# -- GPTQ behind vLLM ----------------------------------------------------------------------------------------


@needs_vllm
async def test_kv_pool_and_weights_of_a_gptq_model_served_by_vllm_equal_the_plan(
    vllm: Served, gptq: Path, bare: dict[str, Any]
) -> None:
    async with vllm.client() as http:
        report = (await http.get("/memory")).json()
    assert report["pool"]["blocks"]["num"] == report["plan"]["kv_cache"]["num_blocks"] == BLOCKS
    assert bare["blocks"] == BLOCKS
    assert report["difference"]["kv_pool_bytes"] == 0
    # of the file's tensors vLLM's CPU kernel drops zero points and group indices
    tensors = load_file(gptq / "model.safetensors")
    dropped = sum(t.nbytes for name, t in tensors.items() if name.endswith(("qzeros", "g_idx")))
    planned = report["plan"]["ranks"][0]["weights_bytes"]
    assert report["measured"]["weights_bytes"] == planned
    assert dropped > planned // 100


@needs_vllm
async def test_greedy_outputs_of_a_gptq_model_equal_those_of_plain_vllm(
    vllm: Served, bare: dict[str, Any]
) -> None:
    assert len(set(bare["texts"])) == len(PROMPTS)
    async with vllm.client() as http:
        for prompt, expected in zip(PROMPTS, bare["texts"], strict=True):
            body = completion(prompt=prompt, max_tokens=MAX_TOKENS, temperature=0)
            answer = (await http.post(COMPLETIONS, json=body)).json()
            assert answer["choices"][0]["text"] == expected


@needs_vllm
async def test_no_request_is_preempted_under_a_load_that_preempts_on_plain_vllm(
    vllm: Served, bare: dict[str, Any]
) -> None:
    assert bare["preemptions"] > 0
    waited = vllm.metric('tonnage_admission_decisions_total{model="demo",outcome="wait"')
    async with vllm.client() as http:
        answers = await asyncio.gather(*(
            http.post(COMPLETIONS, json=completion(
                prompt=ids, max_tokens=OVERLOAD_TOKENS, temperature=0, ignore_eos=True
            ))
            for ids in OVERLOAD
        ))  # fmt: skip
        own = (await http.get("/metrics/vllm")).text
    assert 200 in {answer.status_code for answer in answers}
    assert vllm.metric('tonnage_admission_decisions_total{model="demo",outcome="wait"') > waited
    (line,) = [line for line in own.splitlines() if line.startswith("vllm:num_preemptions_total{")]
    assert float(line.rsplit(" ", 1)[1]) == 0
