"""Print the results of SGLang's own state functions, with its unpacked sources and cases on standard input.

SGLang imports packages that a machine without a GPU lacks. The functions are therefore extracted from their
files and run with stand-ins for SGLang's global settings.
"""

from __future__ import annotations
import __future__ as future

import ast
import json
import logging
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Optional

SOURCES = Path(sys.argv[1]) / "sglang" / "srt"


def taken(file: str, names: set[str], scope: dict[str, Any]) -> dict[str, Any]:
    """Return the named functions and constants of a file, executed in ``scope``."""
    tree = ast.parse((SOURCES / file).read_text())
    found = [
        node
        for node in ast.walk(tree)
        if (isinstance(node, ast.FunctionDef) and node.name in names)
        or (isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") in names)
    ]
    for node in found:
        if isinstance(node, ast.FunctionDef):
            node.decorator_list = []
    module = ast.fix_missing_locations(ast.Module(found, []))
    exec(compile(module, file, "exec", flags=future.annotations.compiler_flag), scope)
    return scope


def divide(a: int, b: int) -> int:
    assert a % b == 0
    return a // b


def setting(value: Any) -> SimpleNamespace:
    return SimpleNamespace(get=lambda: value)


ENVS = SimpleNamespace(
    SGLANG_MAMBA_CONV_DTYPE=setting("bfloat16"), SGLANG_MAMBA_SSM_DTYPE=setting(None),
    SGLANG_OPT_MAMBA_SKIP_DECODE_LOCK=setting(False),
)  # fmt: skip
for name, content in (
    ("sglang.srt.distributed.utils", {"divide": divide}),
    ("sglang.srt.environ", {"envs": ENVS}),
):
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        sys.modules.setdefault(".".join(parts[:end]), ModuleType(parts[end - 1]))
    vars(sys.modules[name]).update(content)
UTILS = ModuleType("mamba_utils")
sys.modules["mamba_utils"] = UTILS
exec((SOURCES / "configs/mamba_utils.py").read_text(), vars(UTILS))


def cache_params(case: dict[str, Any]) -> Any:
    config, ranks = case["config"], case["ranks"]
    scope = {
        **vars(UTILS), "_is_cpu": False, "linear_attn_tp_size": lambda: ranks,
        "get_parallel": lambda: SimpleNamespace(attn_tp_size=ranks, tp_size=ranks),
    }  # fmt: skip
    function = taken(case["file"], {"mamba2_cache_params"}, scope)["mamba2_cache_params"]
    layers = case["layers"]
    return function(SimpleNamespace(**config, linear_layer_ids=layers, mamba_layer_ids=layers))


def answer(case: dict[str, Any]) -> dict[str, Any]:
    params = cache_params(case)
    schedule = SimpleNamespace(
        max_mamba_cache_size=None, mamba_full_memory_ratio=case["ratio"], disable_overlap_schedule=False,
        max_running_requests=case["requests"] or (48 if case["verified"] else None),
    )  # fmt: skip
    mamba = SimpleNamespace(
        enable_mamba_extra_buffer=case["extra_buffer"] and case["radix"], enable_mamba_extra_buffer_lazy=False,
        enable_linear_replayssm_spec=False,
    )  # fmt: skip
    scope: dict[str, Any] = {
        "Optional": Optional, "envs": ENVS, "logger": logging.getLogger("sglang"),
        "get_schedule": lambda: schedule, "get_exec": lambda: SimpleNamespace(mamba=mamba),
        "get_spec": lambda: SimpleNamespace(speculative_num_draft_tokens=case["verified"] or None),
        "_pd_prefill_skips_mamba_spec_state": lambda: False,
        "get_memory": lambda: SimpleNamespace(disable_radix_cache=not case["radix"]),
        "get_context": lambda: SimpleNamespace(override=lambda _, **new: vars(schedule).update(new)),
    }  # fmt: skip
    taken("mem_cache/allocation_sizing.py", {"get_mamba_tracking_slots"}, scope)
    names = {"_handle_max_mamba_cache", "_calculate_mamba_ratio", "resolve_max_num_reqs"}
    constants = {
        "MAMBA_CACHE_SIZE_MAX_RUNNING_REQUESTS_RATIO", "MAMBA_CACHE_BASE_RATIO_DROP_ON_SKIP",
        "MAMBA_CACHE_V2_ADDITIONAL_RATIO_NO_BUFFER",
    }  # fmt: skip
    taken("mem_cache/kv_cache_configurator.py", names | constants, scope)
    runner = SimpleNamespace(
        mambaish_config=SimpleNamespace(mamba2_cache_params=params), pp_size=1, attn_dp_size=1,
        fused_entry_bytes=lambda _: None, spec_algorithm=SimpleNamespace(is_none=lambda: not case["verified"]),
        hybrid_gdn_config=None, hybrid_kda_config=None, extra_mamba_cache_bytes_per_req=0,
        model_config=SimpleNamespace(context_len=case["length"]),
    )  # fmt: skip
    runner._calculate_mamba_ratio = lambda: scope["_calculate_mamba_ratio"](runner)
    left = int(scope["_handle_max_mamba_cache"](runner, case["rest"] / (1 << 30)) * (1 << 30))
    tokens = left // case["token_bytes"]
    return {
        "slot_bytes": params.mamba_cache_per_req, "slots": schedule.max_mamba_cache_size, "left": left,
        "tokens": tokens,
        "running": scope["resolve_max_num_reqs"](runner, tokens),
    }  # fmt: skip


print("RESULT " + json.dumps([answer(case) for case in json.load(sys.stdin)]))
