"""``tonnage demo`` (``make demo``): plan, serve and measure the demo model once, with a real client.

The command prints the plan and starts ``tonnage serve demo`` on loopback. It sends eight completion requests
concurrently through the openai package, four of them streamed, and prints the results. Then it compares the
plan with the memory that the server's processes hold, and stops the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

from tonnage.planner.errors import DeploymentError, TonnageError
from tonnage.planner.screen import Screen
from tonnage.server.commands.comparison import ComparisonRow, print_table, process_row
from tonnage.server.commands.stopping import stoppable
from tonnage.server.parsers import DEMO_POOL
from tonnage.server.parsers import demo as parser

OK, FAILED = 0, 1

MAX_TOKENS = 24
QUESTIONS = (
    "The capital of France is",
    "Water boils at a temperature of",
    "The opposite of hot is",
    "A triangle has three",
    "The first president of the United States was",
    "The largest planet of the solar system is",
    "Bread is made from flour,",
    "The days of the week are Monday,",
)
# Seconds that the demo server may take to start, which is enough for a cold disk and two busy cores.
_STARTS_WITHIN = 300.0
_STOPS_WITHIN = 30.0


class DemoFailed(TonnageError):
    """An error for a demo server that failed; the server's own messages are printed before it."""

    code = "demo_failed"


_REASON = "the server's messages above state the reason"


def run(argv: list[str]) -> int:
    """Run the demo; return 0 when all completions succeeded and every difference is within its bound."""
    parser().parse_args(argv)
    try:
        import openai  # noqa: F401 -- checked before the demo model is created
    except ImportError:
        raise DeploymentError(
            "the demo's client, the openai package, is not installed", hint="pip install 'tonnage[demo]'"
        ) from None
    started = time.monotonic()
    try:
        with stoppable(), _server() as (url, process):
            print(f"\n{len(QUESTIONS)} completions at once on {url}/v1, every other one streamed:\n")
            asked = time.monotonic()
            width = max(map(len, QUESTIONS))
            for question, answer in zip(QUESTIONS, asyncio.run(_ask(url)), strict=True):
                print(f"  {question:<{width}} ...{answer}")
            print(f"\n{time.monotonic() - asked:.1f} s. Plan against reality:\n")
            rows = _rows(_get(f"{url}/memory"))
            print_table(rows)
            sys.stdout.flush()
            status = _stop(process)
    except DemoFailed as error:
        Screen(sys.stderr).print(f"tonnage: {error}")
        return FAILED
    print(f"\nThe server stopped with status {status}. {time.monotonic() - started:.0f} s in all.")
    return OK if status == 0 and all(row.within for row in rows) else FAILED


@contextlib.contextmanager
def _server() -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Start the demo server, and yield its address and process when it is ready; stop it at exit."""
    command = [sys.executable, "-m", "tonnage.server.cli", "serve", "demo", "--backend", "hf"]
    command += ["--host", "127.0.0.1", "--port", "0", "--kv-cache-memory-bytes", DEMO_POOL]
    # Settings in the environment may be for another server, so they are removed.
    environment = {
        name: value
        for name, value in os.environ.items()
        if name == "TONNAGE_CACHE" or not name.startswith("TONNAGE_")
    }
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        url = ""
        for line in process.stdout:  # the server prints its plan, and then the address on which it listens
            print(line, end="", flush=True)
            if line.startswith("listening on "):
                url = line.split()[-1]
                break
        _wait_ready(url, process)
        yield url, process
    finally:
        # terminate() and kill() send no signal to a process that has ended
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOPS_WITHIN)
        process.kill()
        process.wait()


def _wait_ready(url: str, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + _STARTS_WITHIN
    # `tonnage demo` shows no progress while it waits, because the server prints its own
    while process.poll() is None and time.monotonic() < deadline:
        if url and _is_ready(url):
            return
        time.sleep(0.1)
    if process.poll() is None:
        raise DemoFailed(f"the demo server was not ready after {_STARTS_WITHIN:.0f} s", hint=_REASON)
    raise DemoFailed(
        f"the demo server ended with status {process.returncode} before it was ready", hint=_REASON
    )


def _is_ready(url: str) -> bool:
    try:
        with _LOOPBACK.open(f"{url}/ready", timeout=5):
            return True
    except urllib.error.HTTPError as error:
        if error.code == 503:
            return False
        raise DemoFailed(f"/ready answered {error.code}") from None
    except OSError:
        return False


async def _ask(url: str) -> list[str]:
    """Send the demo's questions to the server concurrently; return the completions in the questions' order."""
    import openai  # imported here, because the extra demo is optional

    # The client ignores proxies set in the environment. It does not retry, because a retry would hide an error.
    async with openai.AsyncOpenAI(
        base_url=f"{url}/v1",
        api_key="unused",
        max_retries=0,
        http_client=openai.DefaultAsyncHttpxClient(trust_env=False),
    ) as client:

        async def one(number: int, question: str) -> str:
            request: dict[str, Any] = {
                "model": "demo",
                "prompt": question,
                "max_tokens": MAX_TOKENS,
                "temperature": 0,
                "stop": ["\n"],
            }
            if number % 2 == 0:
                done = await client.completions.create(**request)
                return str(done.choices[0].text)
            pieces = []
            async for chunk in await client.completions.create(**request, stream=True):
                pieces += [choice.text for choice in chunk.choices]
            return "".join(pieces)

        try:
            return await asyncio.gather(*(one(number, question) for number, question in enumerate(QUESTIONS)))
        except openai.OpenAIError as error:
            raise DemoFailed(f"a completion request to the demo server failed: {error}") from error


def _rows(report: dict[str, Any]) -> list[ComparisonRow]:
    """Return the rows that compare the plan made before the load with the measured bytes, both from /memory."""
    rank = report["plan"]["ranks"][report["plan"]["worst_rank"]]
    measured = report["measured"]
    used = rank["total_bytes"] - rank["free_bytes"]
    return [
        ComparisonRow("weights", rank["weights_bytes"], measured["weights_bytes"]),
        ComparisonRow("KV pool", rank["kv_pool_bytes"], measured["kv_pool_bytes"]),
        process_row("hf", "cpu", used, measured["process_peak_bytes"]),
    ]


# An HTTP opener that ignores proxies set in the environment, because a proxy cannot reach this machine's
# loopback address.
_LOOPBACK = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def _get(url: str) -> dict[str, Any]:
    with _LOOPBACK.open(url, timeout=30) as response:
        report: dict[str, Any] = json.load(response)
    return report


def _stop(process: subprocess.Popen[str]) -> int:
    process.send_signal(signal.SIGTERM)
    try:
        return process.wait(_STOPS_WITHIN)
    except subprocess.TimeoutExpired:
        raise DemoFailed(f"the demo server did not stop within {_STOPS_WITHIN:.0f} s") from None
