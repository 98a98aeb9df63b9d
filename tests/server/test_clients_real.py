"""Real clients, called as their users call them: openai, langchain-openai and litellm.

openai is tested sync, async, with streams, retries and typed errors. instructor needs an engine with grammars;
it is tested in test_both_engines.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from typing import Any

import openai
import pytest
from openai.types.chat import ParsedChatCompletionMessage
from openai.types.responses import ResponseFunctionToolCall
from serving import PATIENCE

from tonnage.server.engines.fake import FakeEngine

MESSAGES: list[Any] = [{"role": "user", "content": "hello"}]


async def in_thread(call: Any, *args: Any, **more: Any) -> Any:
    return await asyncio.to_thread(call, *args, **more)


async def test_sync_openai_client_completes_and_streams(server) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    same: dict[str, Any] = {"model": "demo", "temperature": 0}
    chat = await in_thread(client.chat.completions.create, messages=MESSAGES, max_tokens=6, **same)
    assert chat.usage.completion_tokens == 6
    whole = await in_thread(client.completions.create, prompt="hello", max_tokens=6, **same)

    def streamed() -> str:
        chunks = client.completions.create(prompt="hello", max_tokens=6, stream=True, **same)
        return "".join(chunk.choices[0].text for chunk in chunks)

    assert await in_thread(streamed) == whole.choices[0].text

    def responses() -> tuple[str, str]:
        events = list(client.responses.create(input="hello", max_output_tokens=6, stream=True, **same))
        deltas = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        return deltas, events[-1].response.output_text

    deltas, final = await in_thread(responses)
    assert deltas == final == chat.choices[0].message.content
    assert [model.id for model in (await in_thread(client.models.list)).data] == ["demo"]
    assert (await in_thread(client.models.retrieve, "demo")).id == "demo"


async def test_messages_received_by_the_openai_client_can_be_sent_back_as_objects_and_as_dicts(server) -> None:
    """As the object it is, and as a dict with all that its types know."""
    same: dict[str, Any] = {"model": "demo", "temperature": 0}
    chat = await server.openai.chat.completions.create(messages=MESSAGES, max_tokens=6, **same)
    message = chat.choices[0].message
    parsed = ParsedChatCompletionMessage[dict[str, int]](**message.model_dump(), parsed={"a": 1})
    prompts = set()
    for back in (message, message.model_dump(), parsed, parsed.model_dump()):
        again = await server.openai.chat.completions.create(
            messages=[*MESSAGES, back, *MESSAGES], max_tokens=6, **same
        )
        prompts.add(again.usage.prompt_tokens)
    assert len(prompts) == 1
    response = await server.openai.responses.create(input="hello", max_output_tokens=6, **same)
    for item in (response.output[0], response.output[0].model_dump()):
        again = await server.openai.responses.create(
            input=[*MESSAGES, item, *MESSAGES], max_output_tokens=6, **same
        )
        assert again.output_text
    call: dict[str, Any] = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    whole = ResponseFunctionToolCall(**call).model_dump()
    output = {"type": "function_call_output", "call_id": "1", "output": "x"}
    for item in (whole, call | {"async_": None}, call | {"async": None}):  # openai 3 knows one field more
        sent = [*MESSAGES, item, output]
        await server.openai.responses.create(input=sent, max_output_tokens=6, **same)


async def test_openai_client_raises_the_error_class_of_each_http_status(server) -> None:
    async def ask(**more: Any) -> None:
        await server.openai.chat.completions.create(
            **({"model": "demo", "messages": MESSAGES, "max_tokens": 2} | more)
        )

    with pytest.raises(openai.NotFoundError):
        await ask(model="gpt-4")
    with pytest.raises(openai.BadRequestError) as caught:
        await ask(max_tokens=10**5)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "max_tokens")
    with pytest.raises(openai.BadRequestError, match="unknown field: foo"):
        await ask(extra_body={"foo": 1})


async def test_openai_client_retries_only_when_retry_after_is_sent(run_server, small_plan) -> None:
    async with run_server(FakeEngine(small_plan(), token_rate=200), max_num_queued_reqs=2) as server:
        client = server.openai.with_options(max_retries=20)
        answers = await asyncio.gather(*(
            client.completions.create(model="demo", prompt="a", max_tokens=30) for _ in range(6)
        ))  # fmt: skip
        assert len(answers) == 6
        rejected = server.state.accounts.outcomes["rejected"]
        assert rejected > 0
        with pytest.raises(openai.BadRequestError):  # n = 3 never fits a queue of 2
            await client.completions.create(model="demo", prompt="a", max_tokens=2, n=3)
        assert server.state.accounts.outcomes["rejected"] == rejected + 1


async def test_langchain_client_gets_whole_and_streamed_answers(server) -> None:
    langchain = pytest.importorskip("langchain_openai", reason="langchain-openai is in the dev extra")
    model = langchain.ChatOpenAI(
        model="demo", base_url=f"{server.url}/v1", api_key="none", max_tokens=6, temperature=0, max_retries=0
    )
    whole = await model.ainvoke("hello")
    assert whole.usage_metadata["output_tokens"] == 6
    assert (await model.ainvoke([("user", "hello"), whole, ("user", "and then?")])).content
    parts = [chunk async for chunk in model.astream("hello")]
    assert "".join(str(part.content) for part in parts) == whole.content
    assert len(parts) > 2
    plain = langchain.OpenAI(model="demo", base_url=f"{server.url}/v1", api_key="none", max_tokens=6)
    assert await plain.ainvoke("hello")


LITELLM = """
import json, sys
import litellm
litellm.suppress_debug_info = True
same = {"model": "hosted_vllm/demo", "api_base": sys.argv[1], "api_key": "none",
        "messages": [{"role": "user", "content": "hello"}], "temperature": 0, "max_tokens": 6}
whole = litellm.completion(**same)
said = whole.choices[0].message
for back in (said, said.model_dump(), said.model_dump() | {"provider_specific_fields": {"refusal": None}}):
    again = litellm.completion(**same | {"messages": [*same["messages"], back, *same["messages"]]})
    assert again.usage.completion_tokens == 6
parts = [chunk.choices[0].delta.content or "" for chunk in litellm.completion(stream=True, **same)]
try:
    litellm.completion(**same | {"max_tokens": 10**6})
    error = None
except litellm.ContextWindowExceededError as caught:
    error = "context"
except litellm.BadRequestError as caught:
    error = "bad request"
print(json.dumps([whole.choices[0].message.content, "".join(parts), whole.usage.completion_tokens, error]))
"""


async def test_litellm_client_gets_whole_and_streamed_answers_and_its_own_error_classes(server) -> None:
    """In a process of its own: it is imported with a price list for the whole world."""
    done = await in_thread(
        subprocess.run,
        [sys.executable, "-c", LITELLM, f"{server.url}/v1"],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env=os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "NO_PROXY": "*"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    whole, streamed, tokens, error = json.loads(done.stdout.splitlines()[-1])
    assert whole == streamed
    assert tokens == 6
    assert error in ("context", "bad request")
