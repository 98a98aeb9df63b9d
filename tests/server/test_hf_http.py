"""``tonnage serve demo`` with the Hugging Face engine, started as by a user and called by real HTTP clients."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import psutil
import pytest
from openai.types import Completion
from serving import PATIENCE

from tonnage.server.demo.model import ensure_demo

FLAGS = ["--max-model-len", "1024", "--kv-cache-memory-bytes", "128MiB", "--max-num-seqs", "64", "--port", "0"]
get = functools.partial(httpx.get, timeout=PATIENCE)


@contextlib.contextmanager
def serving(*flags: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Yield the address and the process of a ready server.

    On SIGTERM the server must exit with status 0 and leave no process.
    """
    ensure_demo()
    command = [sys.executable, "-m", "tonnage.server.cli", "serve", "demo", *FLAGS, *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        url = next(line.split()[-1] for line in process.stdout if line.startswith("listening on "))
        until(lambda: get(f"{url}/ready").status_code == 200, PATIENCE)
        children = psutil.Process(process.pid).children(recursive=True)
        yield url, process
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
        assert psutil.wait_procs(children, timeout=PATIENCE)[1] == []
    finally:
        if process.poll() is None:
            process.kill()


def until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, subprocess.Popen[str]]]:
    with serving() as made:
        yield made


@pytest.fixture
def url(server: tuple[str, subprocess.Popen[str]]) -> str:
    return server[0]


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as sdk:
        yield sdk


def blocks_are_free(url: str) -> bool:
    pool = get(f"{url}/memory").json()["pool"]["blocks"]
    return bool(pool["used"] == 0 and pool["promised"] == 0)


@pytest.mark.parametrize("echo", [False, True])
def test_completion_without_streaming_has_the_same_logprobs_as_the_stream(
    client: openai.OpenAI, echo: bool
) -> None:
    asked: dict[str, Any] = {
        "model": "demo", "prompt": ["The sun is", "One, two"], "max_tokens": 6, "temperature": 0, "logprobs": 3,
        "echo": echo,
    }  # fmt: skip
    whole = client.completions.create(**asked)
    streamed: list[dict[str, list[Any]]] = [{}, {}]
    for event in client.completions.create(**asked, stream=True):
        for choice in event.choices:
            assert choice.logprobs is not None
            for name, values in choice.logprobs.model_dump().items():
                streamed[choice.index].setdefault(name, []).extend(values or [])
    found = [choice.logprobs.model_dump() for choice in whole.choices if choice.logprobs]
    assert found == streamed
    assert all(len(each["tokens"]) == 6 + (3 if echo else 0) for each in found[:1])


def test_chat_completion_without_streaming_has_the_same_logprobs_as_the_stream(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": "demo", "messages": [{"role": "user", "content": "Say something."}], "max_tokens": 6, "n": 2,
        "temperature": 0, "logprobs": True, "top_logprobs": 4,
    }  # fmt: skip
    whole = client.chat.completions.create(**asked)
    streamed: list[list[Any]] = [[], []]
    for event in client.chat.completions.create(**asked, stream=True):
        for choice in event.choices:
            if choice.logprobs is not None:
                streamed[choice.index] += choice.logprobs.model_dump()["content"] or []
    found = [choice.logprobs.model_dump() for choice in whole.choices if choice.logprobs]
    assert [each["content"] for each in found] == streamed
    assert [len(each) for each in streamed] == [6, 6]
    assert all(len(token["top_logprobs"]) == 4 for token in streamed[0])


def test_streamed_completion_equals_whole_completion_and_reports_usage(client: openai.OpenAI) -> None:
    body: dict[str, Any] = {
        "model": "demo",
        "prompt": "The capital of France is",
        "max_tokens": 16,
        "temperature": 0,
    }
    whole = client.completions.create(**body)
    Completion.model_validate(whole.model_dump(exclude_unset=True), strict=True)
    assert "Paris" in whole.choices[0].text
    pieces, usage = [], None
    for chunk in client.completions.create(**body, stream=True, stream_options={"include_usage": True}):
        pieces += [choice.text for choice in chunk.choices]
        usage = chunk.usage or usage
    assert "".join(pieces) == whole.choices[0].text
    assert usage == whole.usage


def test_completion_supports_n_stop_seed_and_prompt_lists(client: openai.OpenAI) -> None:
    body: dict[str, Any] = {"model": "demo", "max_tokens": 12, "temperature": 1.0, "seed": 5}
    four = client.completions.create(**body, prompt=["One day", "Two days"], n=2)
    again = client.completions.create(**body, prompt=["One day", "Two days"], n=2)
    assert [choice.text for choice in four.choices] == [choice.text for choice in again.choices]
    assert [choice.index for choice in four.choices] == [0, 1, 2, 3]
    stopped = client.completions.create(
        model="demo", prompt="Count: 1, 2, 3, 4,", max_tokens=40, temperature=0, stop=[" 7"]
    )
    assert " 7" not in stopped.choices[0].text
    assert stopped.choices[0].finish_reason == "stop"


def test_websocket_upgrade_request_is_answered_like_an_ordinary_http_get(url: str) -> None:
    """The server ignores the upgrade, so the connection stays within the limits of its HTTP protocol."""
    upgrade = {
        "connection": "Upgrade", "upgrade": "websocket", "sec-websocket-version": "13",
        "sec-websocket-key": "dGhlIHNhbXBsZSBub25jZQ==",
    }  # fmt: skip
    refused = get(f"{url}/v1/responses", headers=upgrade)
    assert (refused.status_code, refused.json()["error"]["code"]) == (405, "method_not_allowed")
    assert get(f"{url}/health", headers=upgrade).status_code == 200


def test_prompt_that_can_never_fit_is_rejected_at_submit(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="demo", prompt=[5] * 1000, max_tokens=100)
    assert refused.value.code == "context_length_exceeded"
    assert "1024" in refused.value.message
    assert "1100" in refused.value.message
    assert refused.value.response.headers["x-should-retry"] == "false"


async def test_all_kv_blocks_are_free_after_50_clients_disconnect_in_their_streams(url: str) -> None:
    async def leave(number: int) -> int:
        async with httpx.AsyncClient(timeout=PATIENCE) as http:
            body = {"model": "demo", "prompt": f"Story {number}: once", "max_tokens": 300, "stream": True}
            async with http.stream("POST", f"{url}/v1/completions", json=body) as response:
                async for line in response.aiter_lines():
                    if line.startswith("data:"):
                        return response.status_code  # the connection is closed on the way out
        raise AssertionError("the stream ended by itself")

    assert set(await asyncio.gather(*(leave(number) for number in range(50)))) == {200}
    await asyncio.to_thread(until, lambda: blocks_are_free(url), PATIENCE)


def test_measured_weight_and_pool_bytes_equal_the_plan(url: str) -> None:
    report = get(f"{url}/memory").json()
    rank = report["plan"]["ranks"][0]
    assert report["plan"]["revision"] == 0
    assert report["measured"]["weights_bytes"] == rank["weights_bytes"]
    assert report["measured"]["kv_pool_bytes"] == rank["kv_pool_bytes"]


def test_api_process_loads_no_torch_and_survives_engine_death(
    server: tuple[str, subprocess.Popen[str]],
) -> None:
    """This must stay the last test of the shared server, because it kills the engine."""
    url, process = server
    maps = [region.path for region in psutil.Process(process.pid).memory_maps()]
    assert not [path for path in maps if "libtorch" in path]
    children = psutil.Process(process.pid).children()
    (engine,) = (child for child in children if "tonnage.server.engines.hf" in child.cmdline())
    body = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 800, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=PATIENCE) as response:
        lines = (line for line in response.iter_lines() if line.startswith("data:"))
        next(lines)
        os.kill(engine.pid, signal.SIGKILL)
        rest = list(lines)
    assert any('"error"' in line for line in rest)
    until(lambda: get(f"{url}/ready").status_code == 503, PATIENCE)
    assert get(f"{url}/health").status_code == 200
    refused = httpx.post(f"{url}/v1/completions", json={"model": "demo", "prompt": "x"}, timeout=PATIENCE)
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "engine_dead"
