"""Tests of the GPU catalogue: sources of every figure, lookup by name, and the nominal memory reserve."""

from __future__ import annotations

import json
import re
import sys
from datetime import date
from pathlib import Path
from statistics import median
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import tonnage.planner.devices.catalogue as gpus
from tonnage.planner.deployment import Deployment
from tonnage.planner.devices.catalogue import (
    LARGEST_RESERVE,
    NOMINAL_RESERVE,
    capability_of,
    catalogue,
    find_gpu,
    shares_memory,
)
from tonnage.planner.devices.host import host_memory
from tonnage.planner.devices.prices import Cost, cost_of, price_lists, read_prices
from tonnage.planner.errors import DeploymentError
from tonnage.planner.planning.build import make_plan

ENTRIES = json.loads((Path(gpus.__file__).parent / "catalogue.json").read_text())["gpus"]
NEEDED = [
    "t4", "v100", "a10g", "l4", "l40s", "a40", "a100-40g", "a100-80g", "a6000", "rtx-3090", "rtx-4090",
    "rtx-5090", "rtx-pro-6000", "h100-pcie", "h100-sxm", "h200", "gh200", "b200", "b300", "gb10", "mi210",
    "mi300x", "mi325x", "mi350x", "rx-9070-xt", "gaudi-3", "m4-max", "m3-ultra", "cpu", "a10", "a30",
    "l40", "l20", "a5000", "a4000", "rtx-6000-ada", "rtx-3060", "rtx-3080", "rtx-5080", "rtx-5070-ti",
    "rtx-5060-ti", "h100-nvl", "NVIDIA H100 NVL", "NVIDIA B300 SXM6 AC", "r9700", "mi355x", "mi250x", "7900xtx",
    "NVIDIA RTX PRO 6000 Blackwell Server Edition", "thor", "quadro rtx 8000", "rtx-4080-super",
    "NVIDIA GeForce RTX 2080 Ti",
]  # fmt: skip


@pytest.mark.parametrize("name", NEEDED)
def test_common_gpu_names_are_in_the_catalogue(name):
    assert find_gpu(name).memory_bytes > 1 << 30


def test_every_figure_in_the_gpu_catalogue_has_a_source():
    for entry in ENTRIES:
        assert entry["nominal_source"], entry
        assert ("reported_gib" in entry) == ("reported_source" in entry)
        assert ("reported_range_gib" in entry) == ("range_source" in entry)
        for variant in entry.get("variants", ()):
            assert sorted(variant) == ["gib", "source", "when"]
            assert variant["source"]
        assert "usd_per_hour" not in entry  # prices.json
        assert ("speed_source" in entry) == ("memory_gb_per_s" in entry) == ("dense_16bit_tflops" in entry)
        assert ("link" in entry) == ("link_gb_per_s" in entry) >= ("link_mesh" in entry)
        assert ("compute_capability" in entry) == (entry["vendor"] == "nvidia")
    names = [name.lower() for e in ENTRIES for name in (e["name"], *e["aliases"])]
    assert len(names) == len(set(names))


def test_nominal_gpu_memory_minus_the_reserve_is_the_median_of_reported_totals():
    shares = [
        1 - e["reported_gib"] / e["nominal_gib"]
        for e in ENTRIES
        if e["vendor"] == "nvidia" and "reported_gib" in e and not shares_memory(e["name"])
    ]
    assert median(shares) <= NOMINAL_RESERVE + 1e-9 < median(shares) + 0.0025
    assert max(shares) == pytest.approx(LARGEST_RESERVE)


def test_gpu_memory_in_the_catalogue_is_what_the_device_reports():
    assert find_gpu("NVIDIA H100 80GB HBM3").memory_bytes == int(79.18 * (1 << 30))
    for gpu, entry in zip(catalogue(), ENTRIES, strict=True):
        assert gpu.memory_bytes <= (entry["nominal_gib"] + 4) * (1 << 30)
        low, high = gpu.memory_bounds
        assert low <= gpu.memory_bytes <= high
        assert (low < high) or gpu.basis == "reported"


@pytest.mark.parametrize(
    ("name", "gib"),
    [
        ("l40s", 44.39), ("l4", 22.03), ("a10g", 22.06), ("a40", 44.35), ("a6000", 47.40), ("rtx-5090", 31.36),
        ("rtx-pro-6000", 94.97), ("h200", 139.81), ("b300", 267.69), ("r9700", 31.86),
        ("rtx-4090", 23.52),
    ],
)  # fmt: skip
def test_catalogue_memory_total_equals_what_the_driver_prints(name, gib):
    assert find_gpu(name).memory_bytes == int(gib * (1 << 30))
    assert find_gpu(name).basis == "reported"


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("A100-80GB", "a100-80g"), ("A100-SXM4-80GB", "a100-80g"), ("A100-SXM-80GB", "a100-80g"),
        ("A100-PCIE-40GB", "a100-40g"), ("NVIDIA A100 80GB", "a100-80g"), ("H100-80GB", "h100-80g"),
        ("H100 80GB HBM3", "h100-80g"), ("H100-SXM5-80GB", "h100-80g"), ("H200-141GB", "h200-141g"),
        ("GeForce RTX 4090", "rtx4090-24g"), ("RTX 4090 24GB", "rtx4090-24g"), ("T4-16GB", "t4-16g"),
        ("MI300X-192GB", "mi300x-192g"), ("V100-32GB", "v100-32g"),
    ],
)  # fmt: skip
def test_gpu_name_with_gb_or_without_vendor_is_found(name, known):
    assert find_gpu(name).name == known


def test_every_name_and_alias_in_the_gpu_catalogue_is_unambiguous():
    for gpu in catalogue():
        for name in (gpu.name, *gpu.aliases):
            assert find_gpu(name) == gpu, name


def test_catalogue_has_the_memory_total_of_an_r9700_with_ecc():
    """ECC takes 1/16 of 32 GiB: a log with a pool of 15.33 GiB at 0.98 excludes 29.86 GiB without it."""
    (size, setting) = find_gpu("r9700").variants[0]
    assert size == int(29.86 * (1 << 30))
    assert "ECC" in setting
    assert find_gpu("r9700").memory_bytes - size == pytest.approx((32 << 30) // 16, rel=1e-6)


def test_every_gpu_that_vllm_supports_has_a_published_memory_total():
    assert {gpu.vendor for gpu in catalogue() if gpu.basis == "nominal"} == {"apple", "intel"}


def test_plans_interval_covers_the_gpu_memory_totals_of_other_drivers():
    """An L40S has 44.31 to 44.43 GiB by driver; a given total has no such interval."""
    flags = {"engine": "vllm", "max_model_len": 4096, "engine_version": "0.19.0"}
    plan = make_plan("demo", Deployment(gpu="l40s", **flags))
    low, high = plan.intervals["kv_pool_bytes"]
    for gib in (44.31, 44.43):
        given = make_plan("demo", Deployment(gpu="l40s", device_memory=int(gib * (1 << 30)), **flags))
        inner = given.intervals["kv_pool_bytes"]
        assert low <= inner[0] <= inner[1] <= high
        assert inner[1] - inner[0] < high - low
        assert not any("44" in note for note in given.notes)


def test_plan_notes_an_assumed_memory_total_and_its_bounds():
    plan = make_plan("demo", Deployment(engine="llama.cpp", gpu="m4-max", max_model_len=4096))
    assert any("is assumed, between 85.33 GiB and 96.00 GiB" in note for note in plan.notes)


def test_plan_notes_a_gpu_memory_total_that_a_driver_setting_changes():
    plan = make_plan("demo", Deployment(engine="vllm", gpu="rtx-5090", max_model_len=4096))
    assert any("31.84 GiB on Windows and under WSL" in note for note in plan.notes)
    plan = make_plan("demo", Deployment(engine="vllm", gpu="a6000", max_model_len=4096))
    assert any("44.55 GiB with ECC on" in note for note in plan.notes)


def test_error_for_an_unknown_gpu_asks_for_device_memory():
    with pytest.raises(DeploymentError) as caught:
        find_gpu("a600")
    assert "--device-memory" in str(caught.value.hint)
    assert "a6000-48g" in str(caught.value.hint)
    with pytest.raises(DeploymentError) as caught:
        find_gpu("zzzz")
    assert "give --device-memory" in str(caught.value.hint)


def test_every_gpu_price_has_source_url_and_date():
    names = {entry["name"] for entry in ENTRIES}
    lists = json.loads((Path(gpus.__file__).parent / "prices.json").read_text())["lists"]
    assert len(lists) >= 5
    for found in lists:
        assert found["url"].startswith("https://")
        assert found["provider"]
        assert found["terms"]
        for line in found["lines"]:
            assert line["gpu"] in names
            assert line["usd"] > 0
            assert date.fromisoformat(line["read"]) < date(2026, 11, 24)
    assert len(price_lists()) >= 20


def test_gpu_cost_uses_the_lowest_fixed_price_before_marketplace_prices():
    """A user's price comes first, then the lowest fixed price, then a marketplace's.

    Nodes are rented as a whole.
    """
    one = cost_of("h100-80g", 1)
    fixed = [line for line in price_lists()["h100-80g"] if line.together == 1 and not line.marketplace]
    assert one is not None
    assert one.usd == min(line.usd for line in fixed)
    assert re.search(r"\d{4}-\d\d-\d\d$", one.source)
    two = cost_of("v100-16g", 2)  # Lambda rents nodes of eight
    assert two is not None
    assert two.usd == pytest.approx(8 * 0.79)
    assert "8 GPUs together" in two.source
    market = cost_of("t4-16g", 2)
    assert market is not None
    assert "marketplace" in market.source
    assert cost_of("h100-80g", 4, {"h100-80g": 2.1}) == Cost(8.4, "--price")
    assert cost_of("gaudi3-128g", 1) is None
    assert read_prices(["H100=2.10", "gaudi3=1"]) == {"h100-80g": 2.1, "gaudi3-128g": 1.0}


@pytest.mark.parametrize("text", ["h100", "h100=", "h100=-1", "h100=nan", "h100=inf", "h100=2,10", "nothing=1"])
def test_invalid_price_is_rejected(text):
    with pytest.raises(DeploymentError) as caught:
        read_prices([text])
    assert caught.value.field in ("--price", "--gpu")


def test_sxm_and_pcie_variants_of_a_gpu_have_their_own_bandwidth():
    assert find_gpu("h100").bandwidth == 3350e9
    assert find_gpu("h100-pcie").bandwidth == 2000e9
    assert find_gpu("m4-max").bandwidth is None  # Apple publishes no operations per second


def test_every_gpu_that_vllm_supports_has_plausible_bandwidth_and_flops():
    for gpu in catalogue():
        if gpu.vendor == "apple":
            continue
        assert gpu.bandwidth is not None, gpu.name
        assert gpu.flops is not None, gpu.name
        # FP8 has twice the peak of 16 bits on every GPU but Gaudi 3, and needs compute capability 8.9
        if gpu.fp8_flops is not None and gpu.vendor != "intel":
            assert gpu.fp8_flops / gpu.flops == pytest.approx(2, rel=0.03), gpu.name
        if gpu.vendor == "nvidia":
            assert (gpu.fp8_flops is not None) == (gpu.capability >= (8, 9)), gpu.name
        # bytes per second to operations per second: between an H20's and an RTX PRO 6000's
        assert 30 < gpu.flops / gpu.bandwidth < 1000, gpu.name
    assert find_gpu("a40").link == 32e9
    assert find_gpu("h100").link == 450e9
    assert find_gpu("mi300x").link_among(2) == 64e9
    assert find_gpu("mi300x").link_among(8) == 448e9


def test_compute_capability_is_found_by_driver_name():
    assert capability_of("Tesla T4") == capability_of("t4-16g") == (7, 5)
    assert capability_of("NVIDIA A100-SXM4-80GB") == (8, 0)
    assert capability_of("mi300x") is capability_of("brand new") is capability_of(None) is None


def test_values_cpu_and_auto_of_the_gpu_flag_select_this_machine():
    assert find_gpu("cpu").memory_bytes == host_memory()
    assert find_gpu("auto").memory_bytes > 0


def test_device_cuda_without_gpu_name_uses_this_machine():
    """The machine's GPU is used if there is one; otherwise --device-memory is required."""
    asked, here = Deployment(engine="vllm", device="cuda", max_model_len=512), find_gpu("auto")
    if here.device == "cuda":
        assert make_plan("demo", asked).rank.total_bytes == here.memory_bytes
        return
    with pytest.raises(DeploymentError, match="no GPU for --device cuda") as caught:
        make_plan("demo", asked)
    assert caught.value.field == "--device-memory"


def test_misspelled_gpu_name_gets_suggestion():
    with pytest.raises(DeploymentError, match="did you mean h100-80g"):
        find_gpu("h100-80")


def test_gpu_count_in_a_flag_for_one_gpu_is_rejected_with_a_hint():
    with pytest.raises(DeploymentError, match=r"h100-80g --tensor-parallel-size 8; for tonnage train --gpus 8"):
        find_gpu("8xH100")
    with pytest.raises(DeploymentError, match="not in the catalogue"):
        find_gpu("8xh1000")


class _NvmlError(Exception):
    """The error of the module that stands in for pynvml."""


def _install_nvml(monkeypatch: pytest.MonkeyPatch, **replaced: Any) -> list[str]:
    """Put a module in place of pynvml; return the list of its shutdown calls."""
    closed: list[str] = []
    memory = SimpleNamespace(total=100 << 30, reserved=1 << 30)
    members = {
        "NVMLError": _NvmlError, "nvmlMemory_v2": 2, "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: closed.append("closed"), "nvmlDeviceGetCount": lambda: 1,
        "nvmlDeviceGetHandleByIndex": lambda index: index, "nvmlDeviceGetName": lambda handle: "NVIDIA H100",
        "nvmlDeviceGetMemoryInfo": lambda handle, version: memory,
    }  # fmt: skip
    module = ModuleType("pynvml")
    vars(module).update(members | replaced)
    monkeypatch.setitem(sys.modules, "pynvml", module)
    return closed


def _fail(*_: Any, **__: Any) -> Any:
    raise _NvmlError("no answer")


def test_gpu_auto_uses_the_drivers_memory_total_without_the_drivers_reserve(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closed = _install_nvml(monkeypatch)
    found = find_gpu("auto")
    assert (found.name, found.memory_bytes, found.basis) == ("NVIDIA H100", 99 << 30, "reported")
    assert closed == ["closed"]


def test_gpu_auto_uses_the_catalogue_total_if_the_driver_reports_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVML answers "Not Supported" for the memory of a GB10."""
    _install_nvml(monkeypatch, nvmlDeviceGetName=lambda handle: "NVIDIA GB10", nvmlDeviceGetMemoryInfo=_fail)
    assert find_gpu("auto").name == "gb10-128g"


@pytest.mark.parametrize("replaced", [{"nvmlInit": _fail}, {"nvmlDeviceGetCount": lambda: 0}])
def test_gpu_auto_selects_the_cpu_on_a_machine_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch, replaced: dict[str, Any]
) -> None:
    _install_nvml(monkeypatch, **replaced)
    assert find_gpu("auto").name == "cpu"


def test_gpu_auto_error_quotes_a_driver_that_reports_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = _install_nvml(monkeypatch, nvmlDeviceGetMemoryInfo=_fail)
    with pytest.raises(DeploymentError, match="does not report the memory of the GPU: no answer"):
        find_gpu("auto")
    assert closed == ["closed"]
