"""openai-node and Vercel's AI SDK: a script for each (``*.mjs``) makes the calls and checks the answers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from conversations import calling, reasoning
from toolcalls import WEATHER

GIVEN = json.dumps({"calling": calling(), "reasoning": reasoning(), "tool": WEATHER})


@pytest.mark.parametrize("script", ["openai.mjs", "ai_sdk.mjs"])
def test_node_client_script_runs_to_its_end(
    url: str, npm: Path, run: Callable[..., str], tmp_path: Path, script: str
) -> None:
    # Node searches the packages beside the script.
    shutil.copy(Path(__file__).with_name(script), tmp_path)
    (tmp_path / "node_modules").symlink_to(npm)
    assert run("node", str(tmp_path / script), url, GIVEN).endswith("done\n")
