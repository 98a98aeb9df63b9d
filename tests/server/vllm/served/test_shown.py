"""Tests of the commands, log lines and responses that docs/vllm.md shows of a plain ``vllm serve``."""

from __future__ import annotations

import json
import re
from pathlib import Path

import httpx
import pytest
from serving import PATIENCE
from shown import ROOT, serve_lines
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.kv_offload.cpu.policies.factory import CachePolicyFactory
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

from tonnage.server.engines.vllm.disk_tier import DiskTier
from tonnage.server.engines.vllm.host_policy import LearnedCachePolicy

PAGE = (ROOT / "docs/vllm.md").read_text()


def fenced(kind: str) -> str:
    (found,) = re.findall(rf"^```{kind}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    return str(found)


@pytest.mark.parametrize("line", serve_lines(), ids=" ".join)
def test_vllm_command_shown_in_the_documentation_is_valid(line: list[str]) -> None:
    """The fixture `plain` is started with the longest documented command."""
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    engine = EngineArgs.from_cli_args(parser.parse_args(["--model", *line]))
    if engine.kv_transfer_config is not None:  # docs/disk_tier.md
        extra = engine.kv_transfer_config.kv_connector_extra_config
        if "eviction_policy" in extra:
            found = CachePolicyFactory.get_cache_policy_cls(
                extra["eviction_policy"], extra["cache_policy_module_path"]
            )
            assert found is LearnedCachePolicy
        else:
            assert DiskTier is SecondaryTierFactory.get_tier_class(extra["secondary_tiers"][0])
        return
    assert engine.scheduler_cls == "tonnage.server.engines.vllm.scheduler.TonnageScheduler"


def test_log_lines_shown_in_the_documentation_appear_at_vllms_start(plain: str, plain_folder: Path) -> None:
    log = (plain_folder / "log").read_text()
    for line in fenced("text").splitlines():
        process, _, words = line.partition(") ")
        pattern = re.escape(words)
        pattern = re.sub(r"[0-9a-f]{16}", "[0-9a-f]{16}", pattern)  # the plan's number: of this machine
        assert re.search(rf"^{re.escape(process)} pid=\d+\) .*{pattern}$", log, re.MULTILINE), line


def test_rejection_shown_in_the_documentation_equals_the_servers_response(plain: str) -> None:
    body = {"model": "demo", "prompt": [5] * 3000, "max_tokens": 16}
    answer = httpx.post(f"{plain}/v1/completions", json=body, trust_env=False, timeout=PATIENCE)
    assert (answer.status_code, answer.json()) == (400, json.loads(fenced("json")))
