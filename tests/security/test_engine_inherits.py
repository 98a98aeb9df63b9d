"""What reaches an engine that it has no use for: keys of the server, ids outside its vocabulary."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
from serving import PATIENCE

from tonnage.server.engines.fake import FakeEngine
from tonnage.server.engines.request import GenerationRequest

KEY = "key-of-the-server-in-the-tests"


def test_engine_process_does_not_inherit_the_api_key() -> None:
    command = [sys.executable, "-m", "tonnage.server.cli", "serve", "demo", "--port", "0", "--backend", "hf"]
    command += ["--kv-cache-memory-bytes", "48MiB", "--max-model-len", "1024"]
    environment = os.environ | {"TONNAGE_API_KEY": KEY, "tonnage_api_key": KEY}
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment)
    children: list[psutil.Process] = []
    try:
        deadline = time.monotonic() + PATIENCE
        engine = None
        while engine is None:
            assert server.poll() is None
            assert time.monotonic() < deadline, "no engine was started"
            time.sleep(0.05)
            with contextlib.suppress(psutil.Error):  # another child that has ended meanwhile
                children = psutil.Process(server.pid).children(recursive=True)
                # By its own command line: between fork and exec it still shows its parent's environment.
                named = (child for child in children if "tonnage.server.engines.hf" in child.cmdline())
                engine = next(named, None)
        inherited = engine.environ()
        assert "PATH" in inherited
        assert KEY not in inherited.values()
    finally:
        server.kill()
        for child in children:
            if child.is_running():
                child.kill()
        server.wait(PATIENCE)


async def test_eos_token_ids_outside_the_vocabulary_are_not_passed_to_the_engine(
    run_server, small_plan, tokenizer, caplog
) -> None:
    """With min_tokens an engine looks for the logit of each: an id beyond the last one ended it."""
    asked: list[GenerationRequest] = []

    def reply(request: GenerationRequest, index: int) -> Iterator[int]:
        asked.append(request)
        return iter((7,) * 100)

    plan = small_plan()
    vocabulary = plan.model.vocab_size
    caplog.set_level(logging.WARNING, "tonnage.server")
    before = tokenizer.eos_token_ids
    tokenizer.eos_token_ids = (2, vocabulary, 10**9)
    try:
        async with run_server(FakeEngine(plan, reply=reply)) as server:
            assert (await server.complete(max_tokens=2)).status_code == 200
            body = {"model": "demo", "messages": [{"role": "user", "content": "a"}], "max_completion_tokens": 2}
            assert (await server.http.post("/v1/chat/completions", json=body)).status_code == 200
    finally:
        tokenizer.eos_token_ids = before
    assert [request.params.stop_token_ids for request in asked] == [(2,), (2,)]
    assert any(f"vocabulary of {vocabulary}" in record.getMessage() for record in caplog.records)
