"""schemathesis against our own OpenAPI document, open and behind a key, and with a wrong one.

`make test-fuzz` runs all of it, `make test` the coverage phase behind a key.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
from pathlib import Path

import pytest
from serving import PATIENCE

from tonnage.server.engines.fake import FakeEngine

KEY = "a-key-of-the-generated-tests"


async def schemathesis(url: str, phase: str, tmp_path: Path, *more: str) -> tuple[int, str]:
    """(exit code, output); every check, one of them on some operations in our own form (schemathesis.toml)."""
    here = Path(__file__)
    process = await asyncio.create_subprocess_exec(
        str(Path(sys.executable).with_name("schemathesis")),
        *("--config-file", str(here.with_name("schemathesis.toml"))),
        *("run", f"{url}/openapi.json", "--phases", phase, "--max-examples", "25"),
        *("--seed", "1", "--no-color", "--no-shrink", "--request-timeout", str(PATIENCE)),
        *("--continue-on-failure", "--generation-database", "none", *more),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        cwd=tmp_path,
        env=os.environ | {"SCHEMATHESIS_HOOKS": str(here.with_name("schemathesis_checks.py"))},
    )
    out, _ = await asyncio.wait_for(process.communicate(), 2 * PATIENCE)
    return process.returncode or 0, out.decode()


@pytest.mark.parametrize(
    ("keys", "phase", "least"),
    [
        pytest.param(True, "coverage", 2000, id="keys-coverage"),
        pytest.param(True, "fuzzing", 150, id="keys-fuzzing", marks=pytest.mark.fuzz),
        pytest.param(False, "coverage,fuzzing", 2150, id="open", marks=pytest.mark.fuzz),
    ],
)
async def test_generated_requests_satisfy_the_openapi_document(
    run_server, small_plan, tmp_path, keys: bool, phase: str, least: int
) -> None:
    engine = FakeEngine(small_plan(4096, max_num_seqs=128))
    settings = {"api_key": (KEY,)} if keys else {}
    more = ("-H", f"Authorization: Bearer {KEY}") if keys else ()
    async with run_server(engine, key=KEY if keys else None, **settings) as server:
        code, out = await schemathesis(server.url, phase, tmp_path, *more)
        assert code == 0, out[-6000:]
        cases = re.search(r"(\d+) generated", out)
        assert cases is not None, out[-2000:]
        assert int(cases[1]) > least
        # The server is as it was: nothing runs, nothing is held, and it still answers.
        assert (await server.complete(max_tokens=2)).status_code == 200
