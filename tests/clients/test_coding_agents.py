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


def test_codex_ends_a_turn(url: str, npm: Path, run: Callable[..., str], tmp_path: Path) -> None:
    instructions, home = tmp_path / "instructions.md", tmp_path / "codex"
    instructions.write_text("Be brief.")
    home.mkdir()
    (home / "config.toml").write_text(CODEX.format(instructions=instructions, url=url))
    line = [str(npm / ".bin/codex"), "exec", "--skip-git-repo-check", "--json", "Say hi"]
    events = [json.loads(event) for event in run(*line, ends=(0, 1), CODEX_HOME=str(home)).splitlines()]
    (answer,) = [
        event["item"]["text"] for event in events if event.get("item", {}).get("type") == "agent_message"
    ]
    assert answer
    if events[-1]["type"] == "turn.failed":  # the model talked on to the end of its context
        assert "max_output_tokens" in events[-1]["error"]["message"], events[-1]
    else:
        assert events[-1]["type"] == "turn.completed", events
        assert events[-1]["usage"]["output_tokens"] > 0


def test_claude_code_answers(url: str, npm: Path, run: Callable[..., str]) -> None:
    line = [str(npm / ".bin/claude"), "-p", "Say hi", "--output-format", "json", "--system-prompt", "Be brief."]
    answer = json.loads(run(
        *line, "--tools", "Read", ANTHROPIC_BASE_URL=url, ANTHROPIC_API_KEY="none", ANTHROPIC_MODEL="demo",
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1", CLAUDE_CODE_MAX_OUTPUT_TOKENS="32", ends=(0, 1),
    ))  # fmt: skip
    # The model may talk on, which the client reports as an error of its own.
    assert not answer["is_error"] or "output token maximum" in answer["result"], answer
    assert answer["usage"]["output_tokens"] > 0
