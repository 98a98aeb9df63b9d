"""Tests of real vLLM on a CPU behind the API: its block count is the plan's, its output is plain vLLM's."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
from serving import PATIENCE, listens
from vllm_demo import LENGTH, MAX_TOKENS, POOL, PROMPTS, SEQUENCES, Bare

from tonnage.planner.deployment import Deployment
from tonnage.planner.errors import DeploymentError
from tonnage.planner.planning.build import make_plan
from tonnage.planner.plans import Plan
from tonnage.server.engines.vllm import processes
from tonnage.server.engines.vllm.arguments import engine_arguments
from tonnage.server.engines.vllm.engine import VLLMEngine
from tonnage.server.watch.client import Client
from tonnage.server.watch.watcher import Watcher

needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed (extra vllm)")


def small_plan(**flags: Any) -> Plan:
    return make_plan(
        "demo",
        Deployment(
            engine="vllm",
            kv_cache_memory_bytes=POOL,
            max_model_len=LENGTH,
            max_num_seqs=SEQUENCES,
            **flags,
        ),
    )


def test_planned_pool_and_block_size_are_passed_to_vllm() -> None:
    plan = small_plan()
    arguments = engine_arguments(plan, enforce_eager=True)
    assert arguments["kv_cache_memory_bytes"] == plan.rank.kv_pool_bytes
    assert (
        arguments["kv_cache_memory_bytes"] // plan.kv_cache.layout.bytes_per_block == plan.kv_cache.num_blocks
    )
    assert arguments["block_size"] == plan.kv_cache.layout.block_size == 128
    assert arguments["max_model_len"] == LENGTH
    assert arguments["max_num_seqs"] == SEQUENCES
    assert engine_arguments(small_plan(dtype="float32"), enforce_eager=True)["kv_cache_dtype"] == "auto"
    fp8 = small_plan(kv_cache_dtype="fp8")
    assert engine_arguments(fp8, enforce_eager=True)["kv_cache_dtype"] == "fp8"


async def test_environment_variable_that_overrides_the_planned_kv_pool_is_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    engine = VLLMEngine(small_plan())
    with pytest.raises(DeploymentError, match=r"VLLM_CPU_KVCACHE_SPACE.*unset it"):
        await engine.start()
    await engine.stop()


def memory(server: str) -> dict[str, Any]:
    report: dict[str, Any] = httpx.get(f"{server}/memory", trust_env=False, timeout=PATIENCE).json()
    return report


def until(condition: Any, server: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"{memory(server)['pool']['blocks']}, {waiting(server)} waiting")
        time.sleep(0.02)


@needs_vllm
def test_number_of_kv_blocks_in_vllm_equals_the_plan(server: str, bare: Bare) -> None:
    report = memory(server)
    assert report["pool"]["blocks"]["num"] == report["plan"]["kv_cache"]["num_blocks"] == bare.blocks
    assert report["plan"]["kv_cache"]["num_blocks"] == small_plan().kv_cache.num_blocks
    assert report["measured"]["kv_pool_bytes"] == report["plan"]["ranks"][0]["kv_pool_bytes"]
    assert report["difference"]["kv_pool_bytes"] == 0
    assert report["measured"]["process_peak_bytes"] > report["measured"]["kv_pool_bytes"]


@needs_vllm
def test_watch_shows_the_plan_that_the_vllm_backed_server_reports(server: str, bare: Bare) -> None:
    found = Watcher(Client(server), {}, None).observe()
    assert found.facts.title == "Tonnage"
    assert found.reading.blocks("num_blocks") == bare.blocks
    assert found.planned is not None
    assert found.measured["kv_pool"] == found.planned.components["kv_pool"]


@needs_vllm
def test_memory_of_all_vllm_processes_equals_the_planned_bytes(server: str) -> None:
    report = memory(server)
    rank = report["plan"]["ranks"][0]
    planned = sum(size for name, size in rank.items() if name not in ("free_bytes", "total_bytes"))
    assert report["measured"]["process_bytes"] <= 1.03 * planned


@needs_vllm
def test_greedy_output_equals_plain_vllm(client: openai.OpenAI, bare: Bare) -> None:
    for prompt, expected in zip(PROMPTS, bare.texts, strict=True):
        answer = client.completions.create(model="demo", prompt=prompt, max_tokens=MAX_TOKENS, temperature=0)
        assert answer.choices[0].text == expected


@needs_vllm
def test_stream_with_usage_has_the_same_text_as_the_whole_completion(client: openai.OpenAI, bare: Bare) -> None:
    chunks = list(
        client.completions.create(
            model="demo",
            prompt=PROMPTS[1],
            max_tokens=MAX_TOKENS,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(choice.text for chunk in chunks for choice in chunk.choices)
    assert text == bare.texts[1]
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.completion_tokens == MAX_TOKENS


@needs_vllm
def test_vllm_backend_honours_n_seed_and_stop(client: openai.OpenAI) -> None:
    same: dict[str, Any] = {"model": "demo", "prompt": "My favourite animal is", "max_tokens": 12, "seed": 7}
    first, second = (client.completions.create(**same, n=3, temperature=1.0) for _ in range(2))
    texts = [choice.text for choice in sorted(first.choices, key=lambda choice: choice.index)]
    assert len(texts) == 3
    assert len(set(texts)) > 1, "three samples that are all the same"
    assert texts == [choice.text for choice in sorted(second.choices, key=lambda choice: choice.index)]
    greedy = client.completions.create(**same, n=2, temperature=0)
    assert greedy.choices[0].text == greedy.choices[1].text
    stopped = client.completions.create(
        model="demo", prompt="One, two, three,", max_tokens=40, temperature=0, stop=["six"]
    )
    assert stopped.choices[0].finish_reason == "stop"
    assert "six" not in stopped.choices[0].text


@needs_vllm
def test_request_that_never_fits_gets_400_with_numbers(server: str, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="demo", prompt="hello " * 300, max_tokens=2000)
    assert caught.value.response.headers["x-should-retry"] == "false"
    assert str(LENGTH) in caught.value.message
    # n sequences that fit one by one but never together: 13 x 16 blocks of 181
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="demo", prompt="hello", max_tokens=2000, n=13)
    assert caught.value.code == "exceeds_kv_capacity"
    assert "208 KV blocks, the pool has 181" in caught.value.message


def stream_until(leave: threading.Event, server: str, number: int) -> None:
    """Stream a request and disconnect after `leave`; a waiting request gets its first line later."""
    body = {
        "model": "demo",
        "prompt": f"Story {number}: ",
        "max_tokens": 2000,
        "ignore_eos": True,  # short outputs could all end before the test looks
        "stream": True,
        "temperature": 1.0,
        "seed": number,
    }
    with (
        httpx.Client(trust_env=False, timeout=PATIENCE) as http,
        http.stream("POST", f"{server}/v1/completions", json=body) as response,
    ):
        assert response.status_code == 200, response.read()
        said = ""
        for line in response.iter_lines():
            if leave.is_set():
                return
            said = line or said
    pytest.fail(f"the story ended by itself: {said}")


def waiting(server: str) -> float:
    """Return the number of waiting requests in /metrics."""
    for line in httpx.get(f"{server}/metrics", trust_env=False, timeout=PATIENCE).text.splitlines():
        if line.startswith("tonnage_engine_requests{") and 'state="waiting"' in line:
            return float(line.rsplit(" ", 1)[1])
    raise AssertionError("no such metric")


def pool_is_full(server: str) -> bool:
    blocks = memory(server)["pool"]["blocks"]
    return bool(blocks["promised"] >= 11 * 16 and blocks["used"] > 0)


def is_full_or_over(server: str, streams: list[Future[None]]) -> bool:
    """Return whether the pool is full and a request waits, or a stream has ended."""
    return any(stream.done() for stream in streams) or (pool_is_full(server) and waiting(server) > 0)


@needs_vllm
def test_kv_blocks_of_disconnected_clients_are_freed(server: str, client: openai.OpenAI) -> None:
    """Twice, eleven or more streams of up to 2,000 tokens fill the pool, others wait, and all disconnect."""
    for _ in range(2):
        leave = threading.Event()
        with ThreadPoolExecutor(24) as threads:
            streams = [threads.submit(stream_until, leave, server, number) for number in range(24)]
            try:
                until(partial(is_full_or_over, server, streams), server)
            finally:
                leave.set()
        for stream in streams:
            stream.result()
        until(lambda: memory(server)["pool"]["blocks"]["promised"] == 0, server)
        assert memory(server)["pool"]["blocks"]["used"] == 0
    # vLLM itself has let go of them: another pool full is served without waiting for the aborted ones.
    answer = client.completions.create(model="demo", prompt=PROMPTS, max_tokens=8, temperature=0)
    assert len(answer.choices) == len(PROMPTS)
    metrics = httpx.get(f"{server}/metrics", trust_env=False, timeout=PATIENCE).text
    assert 'tonnage_preemptions_total{model="demo"} 0.0' in metrics
    assert 'tonnage_requests_total{model="demo",outcome="aborted"}' in metrics


@needs_vllm
def test_supported_sampling_parameters_are_passed_to_vllm(client: openai.OpenAI) -> None:
    """Log probabilities, prompt scoring, biases, penalties, grammars and n work behind vLLM."""
    prompt = "The capital of France is"
    same: dict[str, Any] = {"model": "demo", "prompt": prompt, "temperature": 0, "max_tokens": 3}
    scored = client.completions.create(**same, logprobs=2, echo=True).choices[0]
    lists = scored.logprobs
    assert "".join(lists.tokens) == scored.text
    assert lists.text_offset[1] == len(lists.tokens[0])
    assert lists.token_logprobs[0] is None
    assert all(-30 < logprob <= 0 for logprob in lists.token_logprobs[1:])
    # Greedy: each generated token is the best one of its own place.
    for at in (-3, -2, -1):
        token, best = lists.tokens[at], lists.top_logprobs[at]
        assert max(best, key=best.get) == token
        assert best[token] == lists.token_logprobs[at]
    only = client.completions.create(**same | {"max_tokens": 0}, logprobs=1, echo=True)
    assert (only.choices[0].text, only.usage.completion_tokens) == (prompt, 0)
    plain = client.completions.create(**same).choices[0].text
    first = client.completions.create(**same | {"max_tokens": 1}, logprobs=1).choices[0].logprobs.tokens[0]
    (token,) = httpx.post(
        f"{str(client.base_url).removesuffix('/v1/')}/tokenize",
        json={"prompt": first},
        trust_env=False,
        timeout=PATIENCE,
    ).json()["tokens"]
    banned = client.completions.create(**same, logit_bias={str(token): -100}).choices[0].text
    assert not banned.startswith(first)
    assert plain.startswith(first)
    best = client.completions.create(**same | {"temperature": 1}, best_of=3, n=1, seed=1)
    assert len(best.choices) == 1
    assert best.usage.completion_tokens > 3
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}, "people": {"type": "integer"}},
        "required": ["city", "people"],
        "additionalProperties": False,
    }
    chat = client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": "Name a city as JSON."}],
        max_tokens=80,
        temperature=0,
        logprobs=True,
        top_logprobs=2,
        response_format={"type": "json_schema", "json_schema": {"name": "city", "schema": schema}},
    ).choices[0]
    assert set(json.loads(chat.message.content)) == {"city", "people"}
    assert all(len(entry.top_logprobs) == 2 for entry in chat.logprobs.content)
    with pytest.raises(openai.BadRequestError, match="invalid regex"):
        client.completions.create(**same, extra_body={"structured_outputs": {"regex": "((("}})


@needs_vllm
async def test_every_request_under_overload_has_one_outcome_and_none_is_preempted(
    server: str, overload: Any
) -> None:
    outcomes = await overload(server)
    assert outcomes["rejected"] > 0
    async with httpx.AsyncClient(trust_env=False, timeout=PATIENCE) as http:
        own = (await http.get(f"{server}/metrics/vllm")).text
    (line,) = [line for line in own.splitlines() if line.startswith("vllm:num_preemptions_total{")]
    assert float(line.rsplit(" ", 1)[1]) == 0
    assert "vllm:kv_cache_usage_perc{" in own


@needs_vllm
@pytest.mark.parametrize(
    ("name", "how", "told"),
    [
        # Found out, which kills it: so this is also the engine core that is killed.
        ("EngineCore", signal.SIGSTOP, "used no processor time"),
        ("VLLM::Worker", signal.SIGKILL, "vLLM's engine ended"),
    ],
)
async def test_vllm_is_restarted_after_being_stopped_or_killed_during_20_streams(
    server: str, streams_until_killed: Any, name: str, how: signal.Signals, told: str
) -> None:
    family = [process for process in psutil.process_iter() if is_child_of(process, server)]
    (victim,) = [process for process in family if name in " ".join(process.cmdline())]
    api = next(parent for parent in victim.parents() if listens(parent, server))
    files = open_files(api)
    said = await streams_until_killed(server, victim, 20, how)
    assert all(told in message for message in said), said
    assert not victim.is_running()
    deadline = time.monotonic() + PATIENCE
    while len(open_files(api)) > len(files):  # of the clients that were there
        assert time.monotonic() < deadline, sorted(set(open_files(api)) ^ set(files))
        await asyncio.sleep(0.1)
    assert not [child for child in api.children() if child.status() == psutil.STATUS_ZOMBIE]


@needs_vllm
@pytest.mark.parametrize("by_vllm", [False, True])
async def test_failed_shutdown_of_vllm_leaves_no_open_files(
    by_vllm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM asks each process that it kills for its name, and raises if the process has just ended.

    ``by_vllm``: the error occurs in vLLM's own thread, which sees the end of its core first.
    """
    from vllm.v1 import utils

    def gone(pid: int) -> None:
        raise psutil.NoSuchProcess(pid)

    monkeypatch.setattr(utils, "kill_process_tree", gone)
    engine = VLLMEngine(small_plan())
    await engine.start()
    held = engine._llm.engine_core.resources
    (core,) = held.engine_manager.processes
    family = [psutil.Process(core.pid), *psutil.Process(core.pid).children(recursive=True)]
    if by_vllm:
        with monkeypatch.context() as context:
            context.setattr(type(held), "__call__", lambda _: gone(core.pid))
            processes.kill([core.pid])
            threads = [thread for thread in threading.enumerate() if thread.name == "MPClientEngineMonitor"]
            assert threads
            await asyncio.gather(*(asyncio.to_thread(thread.join) for thread in threads))
    await engine.stop()
    assert psutil.wait_procs(family, timeout=PATIENCE)[1] == []
    assert held.ctx.closed
    assert held.output_socket.closed
    assert held.input_socket.closed
    with pytest.raises(ValueError, match="closed"):
        core.is_alive()


def open_files(process: psutil.Process) -> list[str]:
    """Return the target of each open file descriptor."""
    found = []
    for file in Path(f"/proc/{process.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.append(f"{file.name} {file.readlink()}")
    return found


def is_child_of(process: psutil.Process, server: str) -> bool:
    """Return whether the process descends from the process that listens on the address `server`."""
    try:
        return any(listens(parent, server) for parent in process.parents())
    except psutil.NoSuchProcess:
        return False
