"""Codex and Claude Code, which run without an account against a server at another address.

Their prompts are cut to what the demo model's context and a CPU allow.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

CODEX = """\
model = "demo"
model_provider = "local"
model_instructions_file = "{instructions}"
include_permissions_instructions = false
include_environment_context = false

[model_providers.local]
name = "local"
base_url = "{url}/v1"
wire_api = "responses"

[features]
goals = false
"""


def test_codex_completes_a_turn_against_the_server(
    url: str, npm: Path, run: Callable[..., str], tmp_path: Path
) -> None:
    instructions, home = tmp_path / "instructions.md", tmp_path / "codex"
    instructions.write_text("Be brief.")
    home.mkdir()
    (home / "config.toml").write_text(CODEX.format(instructions=instructions, url=url))
    asked = "What is the capital of France?"  # the demo model ends its answer; to "Say hi" it may talk on
    line = [str(npm / ".bin/codex"), "exec", "--skip-git-repo-check", "--json", asked]
    events = [json.loads(event) for event in run(*line, CODEX_HOME=str(home)).splitlines()]
    assert events[-1]["type"] == "turn.completed", events
    assert events[-1]["usage"]["output_tokens"] > 0
    assert any(event.get("item", {}).get("type") == "agent_message" for event in events)


def test_claude_code_gets_an_answer_from_the_server(url: str, npm: Path, run: Callable[..., str]) -> None:
    line = [str(npm / ".bin/claude"), "-p", "Say hi", "--output-format", "json", "--system-prompt", "Be brief."]
    answer = json.loads(run(
        *line, "--tools", "Read", ANTHROPIC_BASE_URL=url, ANTHROPIC_API_KEY="none", ANTHROPIC_MODEL="demo",
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1", CLAUDE_CODE_MAX_OUTPUT_TOKENS="32", ends=(0, 1),
    ))  # fmt: skip
    # The model may talk on, which the client reports as an error of its own.
    assert not answer["is_error"] or "output token maximum" in answer["result"], answer
    assert answer["usage"]["output_tokens"] > 0
