"""The longest callback of the server's event loop while it handles the largest bodies that it accepts.

    python benchmarks/event_loop.py                 every case
    python benchmarks/event_loop.py --case tools    selected cases
    python benchmarks/event_loop.py --check         exit 1 if a callback takes longer than 50 ms

The server runs in this process with the hf engine in its child process, so that every callback can be timed.
Each body is sent by a second process, three times, and the shortest of the three longest callbacks counts:
other programs of the machine delay a callback, and never shorten it. ``cpu ms`` is the longest processor time
of a callback, which other programs hardly change; it leaves out waiting for the interpreter's lock. A callback
is one step of a task or one call of a handle between two turns of the loop. A client disconnects after eight
seconds. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import uvicorn
from abuse.raw_http import CHAT, COMPLETIONS, HOST, MESSAGES, MODEL, RESPONSES

from tonnage.server.app import create_app
from tonnage.server.commands.launch import make_engine, plan_for_loading, select_backend
from tonnage.server.demo.model import ensure_demo
from tonnage.server.engines.heap import settle_heap
from tonnage.server.http.protocol import BoundedHttpProtocol
from tonnage.server.settings import load_settings

LIMIT_MS = 50.0
START_SECONDS, ANSWER_SECONDS = 300.0, 8.0
BODY = 8_000_000  # bytes; the default limit of a body is 8 MiB
HELLO = {"role": "user", "content": "Once"}
TURN = HELLO | {"content": "lorem ip" * 90}
FUNCTION_CALL = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}


def call(arguments: str) -> list[dict[str, Any]]:
    """Return a conversation in which a function was called with ``arguments``."""
    function = {"name": "f", "arguments": arguments}
    made = {"id": "1", "type": "function", "function": function}
    return [HELLO, {"role": "assistant", "content": None, "tool_calls": [made]}]


def tools(count: int, size: int) -> list[dict[str, Any]]:
    """Return ``count`` tools with a description of ``size`` characters."""
    return [
        {"type": "function", "function": {"name": f"f{at}", "description": "x" * size, "parameters": {}}}
        for at in range(count)
    ]


def schema(properties: int) -> dict[str, Any]:
    """Return a JSON schema with ``properties`` properties."""
    return {"type": "object", "properties": {f"p{at}": {"type": "string"} for at in range(properties)}}


# path -> the field that limits an answer to a few tokens
LIMITS = {
    path: {"max_output_tokens" if path == RESPONSES else "max_tokens": 4}
    for path in (COMPLETIONS, CHAT, RESPONSES, MESSAGES)
}

# name -> (path, function that makes the body)
CASES: dict[str, tuple[str, Callable[[], dict[str, Any]]]] = {
    "prompt": (COMPLETIONS, lambda: {"prompt": "lorem ipsu" * (BODY // 10)}),
    "prompts": (COMPLETIONS, lambda: {"prompt": ["lorem ipsu" * 1500] * 512}),
    "token_ids": (COMPLETIONS, lambda: {"prompt": [7] * 262_000}),
    "token_lists": (COMPLETIONS, lambda: {"prompt": [[7] * 500] * 512}),
    "one_letter": (COMPLETIONS, lambda: {"prompt": "a" * BODY}),
    "stop": (COMPLETIONS, lambda: {"prompt": "a", "stop": [chr(97 + at % 26) * 40 for at in range(100)]}),
    "logit_bias": (COMPLETIONS, lambda: {"prompt": "a", "logit_bias": {str(at): 1 for at in range(9_000)}}),
    "choices": (COMPLETIONS, lambda: {"prompt": "a", "n": 32, "max_tokens": 200, "logprobs": 20}),
    "grammar": (COMPLETIONS, lambda: {"prompt": "a", "structured_outputs": {"json": schema(9_000)}}),
    "regex": (COMPLETIONS, lambda: {"prompt": "a", "structured_outputs": {"regex": "(a|b){1,500}" * 400}}),
    "message": (CHAT, lambda: {"messages": [HELLO | {"content": "lorem ipsu" * (BODY // 10)}]}),
    "messages": (CHAT, lambda: {"messages": [HELLO] * 10_000}),
    "parts": (CHAT, lambda: {"messages": [HELLO | {"content": [{"type": "text", "text": "a"}] * 9_000}]}),
    "tools": (CHAT, lambda: {"messages": [HELLO], "tools": tools(100, 70_000)}),
    "many_tools": (CHAT, lambda: {"messages": [HELLO], "tools": tools(9_000, 100)}),
    "arguments": (CHAT, lambda: {"messages": call('{"a":[' + "1," * 250_000 + "1]}")}),
    "long_arguments": (CHAT, lambda: {"messages": call(json.dumps({"a": "x" * (BODY - 1000)}))}),
    "unread": (CHAT, lambda: {"messages": [HELLO | {"parsed": ["x" * 1000] * 7000}]}),
    "chat_logprobs": (CHAT, lambda: {"messages": [HELLO], "logprobs": True, "top_logprobs": 20, "n": 16,
                                     "max_tokens": 400}),
    "input": (RESPONSES, lambda: {"input": "lorem ipsu" * (BODY // 10)}),
    "inputs": (RESPONSES, lambda: {"input": [HELLO] * 10_000}),
    "function_calls": (RESPONSES, lambda: {"input": [FUNCTION_CALL] * 9_900}),
    "unused_tools": (RESPONSES, lambda: {"input": "a", "tool_choice": "none", "tools": [
        {"type": "function", "name": f"f{at}", "description": "x" * 70_000} for at in range(100)
    ]}),
    "metadata": (RESPONSES, lambda: {"input": "a", "metadata": {"a": "x" * (BODY - 1000)}}),
    "turns": (MESSAGES, lambda: {"messages": [TURN] * 9_900}),
    "tool_uses": (MESSAGES, lambda: {"messages": [HELLO, {"role": "assistant", "content": [
        {"type": "tool_use", "id": f"{at}", "name": "f", "input": {"a": [1] * 20}} for at in range(9_000)
    ]}]}),
    "count_tokens": (f"{MESSAGES}/count_tokens", lambda: {"messages": [TURN] * 9_900}),
    "server_tools": (MESSAGES, lambda: {
        "messages": [HELLO], "tools": [{"type": "web_search_" + "a" * 40}] * 90_000,
    }),
    "many_parts": (CHAT, lambda: {"messages": [
        HELLO | {"content": [{"type": "text", "text": "a"}] * 4} for _ in range(9_900)
    ]}),
    "template_arguments": (CHAT, lambda: {
        "messages": [HELLO], "chat_template_kwargs": {"a": [["x" * 60]] * 90_000},
    }),
    "tokenize": ("/tokenize", lambda: {"prompt": "lorem ipsu" * (BODY // 10), "return_token_strs": True}),
    "tokenize_chat": ("/tokenize", lambda: {"messages": [HELLO] * 10_000}),
    "detokenize": ("/detokenize", lambda: {"tokens": [1234] * 2**18}),
    "wrong_items": (CHAT, lambda: {"messages": [{}] * 90_000}),
    "wrong_numbers": (COMPLETIONS, lambda: {"prompt": [[1.5]] * 90_000}),
    "wrong_json": (COMPLETIONS, lambda: {"prompt": "a" * (BODY - 100), "x": "\ud800"}),
    "wrong_stops": (COMPLETIONS, lambda: {"prompt": "a", "stop": [1] * 250_000}),
    "wrong_place": (COMPLETIONS, lambda: {"prompt": "\ud800", "x" * (BODY // 2): [1] * 250_000}),
    "wrong_name": (COMPLETIONS, lambda: {"prompt": "a", "x" * (BODY - 100): 1}),
}  # fmt: skip


class Watchdog:
    """Times every callback of an asyncio event loop while it is used as a context."""

    def __init__(self) -> None:
        self.longest, self.cpu, self.what = 0.0, 0.0, ""

    def __enter__(self) -> Watchdog:
        self._plain = plain = asyncio.events.Handle._run  # type: ignore[attr-defined]

        def timed(handle: Any) -> None:
            since, cpu_since = time.perf_counter(), time.thread_time()
            plain(handle)
            took, cpu = time.perf_counter() - since, time.thread_time() - cpu_since
            if (
                max(took, cpu) > min(self.longest, self.cpu)
                and (what := _name(handle)) != measured.__qualname__
            ):
                self.cpu = max(self.cpu, cpu)
                if took > self.longest:
                    self.longest, self.what = took, what

        asyncio.events.Handle._run = timed  # type: ignore[attr-defined]
        return self

    def __exit__(self, *raised: object) -> None:
        asyncio.events.Handle._run = self._plain  # type: ignore[attr-defined]

    def take(self) -> tuple[float, float, str]:
        """Return the longest callback since the last call, by wall and by processor time (ms), and its name."""
        found = 1e3 * self.longest, 1e3 * self.cpu, self.what
        self.longest, self.cpu, self.what = 0.0, 0.0, ""
        return found


def _name(handle: Any) -> str:
    callback = handle._callback
    owner = getattr(callback, "__self__", None)
    if isinstance(owner, asyncio.Task):
        return str(getattr(owner.get_coro(), "__qualname__", owner))
    return str(getattr(callback, "__qualname__", callback))


def send(port: int, path: str, case: str) -> str:
    """Send the body of a case in this process, and return the status of the answer."""
    import http.client

    body = json.dumps({"model": MODEL} | LIMITS.get(path, {}) | CASES[case][1]()).encode()
    connection = http.client.HTTPConnection(HOST, port, timeout=ANSWER_SECONDS)
    try:
        connection.request("POST", path, body, {"content-type": "application/json"})
        answer = connection.getresponse()
        answer.read()
    except TimeoutError:
        return "disconnected"
    finally:
        connection.close()
    return str(answer.status)


async def measured(names: list[str]) -> list[dict[str, Any]]:
    """Serve the demo model, send the bodies of the cases, and return a row for each."""
    settings = load_settings(
        model="demo", backend="hf", max_model_len=8192, max_num_seqs=32, kv_cache_memory_bytes=2**29
    )
    settings, source = select_backend(settings, sys.stderr)
    app = create_app(settings, make_engine(settings, plan_for_loading(settings, source, sys.stderr)))
    config = uvicorn.Config(
        app, host=HOST, port=0, log_level="warning", http=BoundedHttpProtocol, access_log=False
    )
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve())
    state = app.state.tonnage
    async with asyncio.timeout(START_SECONDS):
        while not (server.started and state.started):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    settle_heap()  # as tonnage serve does
    port = server.servers[0].sockets[0].getsockname()[1]
    rows = []
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as clients, Watchdog() as watchdog:
        loop = asyncio.get_running_loop()
        for name in ["stop", *names]:  # the first run warms up
            path = CASES[name][0]
            runs: list[tuple[float, float, str, str]] = []
            for _ in range(3):
                gc.collect()
                watchdog.take()
                said = await loop.run_in_executor(clients, send, port, path, name)
                await asyncio.sleep(0.1)
                runs.append((*watchdog.take(), said))
            took, _, what, said = min(runs)
            cpu = min(run[1] for run in runs)
            row = {"case": name, "path": path, "longest_ms": round(took, 1), "cpu_ms": round(cpu, 1)}
            rows.append(row | {"in": what, "status": said})
            if len(rows) > 1:
                print(f"{name:<16} {path:<22} {took:8.1f} ms {cpu:8.1f} cpu ms  {said}  {what}", flush=True)
    server.should_exit = True
    await task
    return rows[1:]


def main() -> int:
    """Run the selected cases and print the longest callbacks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs="+", choices=list(CASES), metavar="NAME", help=f"of {', '.join(CASES)}")
    parser.add_argument("--check", action="store_true", help=f"exit 1 above {LIMIT_MS:g} ms")
    parser.add_argument("--json", action="store_true", help="accepted: the last line is always JSON")
    options = parser.parse_args()
    ensure_demo()
    rows = asyncio.run(measured(options.case or list(CASES)))
    over = [row["case"] for row in rows if row["longest_ms"] > LIMIT_MS]
    print(json.dumps({"limit_ms": LIMIT_MS, "over": over, "load_average": os.getloadavg(), "cases": rows}))
    return int(options.check and bool(over))


if __name__ == "__main__":
    sys.exit(main())
