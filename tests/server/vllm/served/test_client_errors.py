"""Tests of requests that can never fit on a plain vLLM: status 400 with numbers, other requests are served."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from serving import PATIENCE
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm_steps import BLOCK, World, config, request, scheduler

from tonnage.server.engines.vllm.client_errors import return_rejections
from tonnage.server.engines.vllm.scheduler import TonnageScheduler

# 3,000 tokens and 16 more are 24 blocks of 128.
LONG = {"model": "demo", "prompt": [5] * 3000, "max_tokens": 16}


@pytest.fixture
def http(plain: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=plain, trust_env=False, timeout=PATIENCE) as http:
        yield http


def sample(http: httpx.Client, name: str) -> float:
    lines = http.get("/metrics").text.splitlines()
    (line,) = [line for line in lines if line.startswith(f'{name}{{model="demo"')]
    return float(line.split()[-1])


def told(error: dict[str, Any], blocks: int, http: httpx.Client) -> None:
    assert (error["code"], error["type"]) == (400, "BadRequestError"), error
    assert f"the request needs {blocks} KV blocks for prompt and max_tokens" in error["message"]
    assert f"the pool has {sample(http, 'tonnage_config_num_blocks') - 1:.0f}" in error["message"]


def test_completion_request_that_never_fits_the_pool_gets_400(http: httpx.Client) -> None:
    answer = http.post("/v1/completions", json=LONG)
    assert answer.status_code == 400, answer.text
    told(answer.json()["error"], 24, http)
    assert "(3000 prompt tokens, max_tokens 16)" in answer.json()["error"]["message"]


def test_chat_request_that_never_fits_the_pool_gets_400_and_one_with_default_max_tokens_succeeds(
    http: httpx.Client,
) -> None:
    """vLLM sets the default max_tokens to all of 4,096 tokens, which need 32 blocks."""
    said = [{"role": "user", "content": "hello"}]
    answer = http.post("/v1/chat/completions", json={"model": "demo", "messages": said})
    assert answer.status_code == 400, answer.text
    told(answer.json()["error"], 32, http)
    short = http.post("/v1/chat/completions", json={"model": "demo", "messages": said, "max_tokens": 8})
    assert short.status_code == 200, short.text


def test_request_for_several_outputs_that_never_fit_the_pool_together_gets_400(http: httpx.Client) -> None:
    answer = http.post("/v1/completions", json=LONG | {"n": 3, "temperature": 1})
    assert answer.status_code == 400, answer.text
    told(answer.json()["error"], 24, http)


@pytest.mark.parametrize("n", [1, 3])
def test_streaming_request_that_never_fits_the_pool_gets_400(http: httpx.Client, n: int) -> None:
    """vLLM has already sent status 200, so the rejection is the last event."""
    body = LONG | {"stream": True, "n": n, "temperature": 1}
    events = [line.removeprefix("data: ") for line in http.post("/v1/completions", json=body).text.splitlines()]
    *_, refusal, done = filter(None, events)
    assert done == "[DONE]"
    told(json.loads(refusal)["error"], 24, http)


def test_rejected_request_does_not_block_the_queue(http: httpx.Client) -> None:
    """Rejections arrive between requests that run and wait, and all other requests are answered."""
    short = {"model": "demo", "prompt": "A story", "max_tokens": 24, "ignore_eos": True}
    bodies = [LONG, short, short, short]
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda body: http.post("/v1/completions", json=body), bodies * 4))
    assert [answer.status_code for answer in answers] == [400, 200, 200, 200] * 4
    assert all(a.json()["usage"]["completion_tokens"] == 24 for a in answers if a.status_code == 200)


# -- without a server


@pytest.mark.parametrize("kind", [RequestOutputKind.FINAL_ONLY, RequestOutputKind.DELTA])
async def test_scheduler_error_is_raised_in_the_waiting_generator(kind: RequestOutputKind) -> None:
    """vLLM's own output processor handles a rejection of our scheduler and a complete output."""
    before = RequestOutputCollector.put
    return_rejections()
    return_rejections()  # vLLM makes a new logger when it scales
    try:
        w = World(scheduler(TonnageScheduler, config(21, mode="guaranteed")))
        w.add(request("never", 21 * BLOCK, 50), 5)
        w.add(request("short", 40, 3), 3)
        w.run()
        processor = OutputProcessor(None, log_stats=False)
        queues = {}
        for name in ("never", "short"):
            sampling = SamplingParams(output_kind=kind, detokenize=False)
            core = EngineCoreRequest(name, [5], None, sampling, None, 0.0, None, None, None)
            core.external_req_id = name
            queues[name] = RequestOutputCollector(kind, name)
            processor.add_request(core, None, None, 0, queues[name])
        processor.process_outputs([w.ended["never"], w.ended["short"]])
        with pytest.raises(VLLMValidationError, match=r"needs 25 KV blocks .* the pool has 20"):
            await queues["never"].get()
        answer = await queues["short"].get()
        assert answer.outputs[0].finish_reason in ("stop", "length")
    finally:
        RequestOutputCollector.put = before  # type: ignore[method-assign]
