"""llm-comply 0.5.0 (PyPI, MIT) on the demo model and hf engine: its Chat Completions and Open Responses suites.

It checks bodies and events against two OpenAPI documents that it carries (OpenAI's 2.3.0, Open Responses
2026-04-24). Open Responses' own tests (openresponses/openresponses, bin/compliance-test.ts) are in no package
index. llm-comply has all of their HTTP tests under the same names; test_open_responses covers the rest.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from serving import PATIENCE

PASSED = ("passed", "", 0)
# Features that this server omits on purpose; test_open_responses checks how it rejects them.
NO_IMAGES = ("failed", "HTTP 400 (expected [200])", 0)
NO_COMPACTION = ("passed", "", 3)  # 404 is one of the answers it takes; nothing is in it
ONLY_REASONING_MODELS = ("skipped", "reasoning requires o-series or gpt-5 models", 0)

# suite -> case -> status, first error, warnings
SUITES: dict[str, dict[str, tuple[str, str, int]]] = {
    "openai-chat": {
        "chat-basic-response": PASSED,
        "chat-system-prompt": PASSED,
        "chat-multi-turn": PASSED,
        "chat-tool-calling": PASSED,
        "chat-streaming-response": PASSED,
        "chat-streaming-usage": PASSED,
        "chat-image-input": NO_IMAGES,
        "chat-reasoning-summary": ONLY_REASONING_MODELS,
        "chat-error-handling": PASSED,
    },
    "open-responses": {
        "basic-response": PASSED,
        "system-prompt": PASSED,
        "multi-turn": PASSED,
        "tool-calling": PASSED,
        "streaming-response": PASSED,
        "streaming-usage": PASSED,
        "image-input": NO_IMAGES,
        "assistant-phase": PASSED,
        "response-output-phase-schema": PASSED,
        "compact-response": NO_COMPACTION,
        "compact-missing-model": PASSED,
        "reasoning-summary": ONLY_REASONING_MODELS,
        "error-handling": PASSED,
    },
}


@pytest.fixture(scope="module")
def results(llm_comply: Path, url: str) -> dict[str, dict[str, Any]]:
    """Return llm-comply's result by suite and case."""
    found = {}
    for suite in SUITES:
        command = [
            *(str(llm_comply), "run", "--json", "--format", suite, "--base-url", f"{url}/v1"),
            *("--model", "demo", "--api-key", "none", "--timeout", str(PATIENCE)),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=2 * PATIENCE)
        assert done.stdout, done.stderr[-3000:]
        found[suite] = {result["id"]: result for result in json.loads(done.stdout)["results"]}
    return found


CASES = [(suite, case) for suite, cases in SUITES.items() for case in cases]


@pytest.mark.parametrize(("suite", "case"), CASES)
def test_each_case_of_the_llm_comply_suites_has_its_expected_result(
    results: dict[str, dict[str, Any]], suite: str, case: str
) -> None:
    result = results[suite][case]
    first, *_ = [*result.get("errors", ()), ""]
    assert (result["status"], first, len(result.get("warnings", ()))) == SUITES[suite][case], result


@pytest.mark.parametrize("suite", SUITES)
def test_every_case_of_the_llm_comply_suites_is_run(results: dict[str, dict[str, Any]], suite: str) -> None:
    assert results[suite].keys() == SUITES[suite].keys()
