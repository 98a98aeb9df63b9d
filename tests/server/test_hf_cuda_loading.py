"""Selection and loading of GPU attention kernels, with modules that stand in for the GPU packages."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tonnage.cache.admission import Limits
from tonnage.planner.engines.runtime.hf import FLASHINFER_WORKSPACE_BYTES
from tonnage.planner.model.layout import KVGroup, KVLayout
from tonnage.server.engines.hf.attention import cuda, flash, flash_infer
from tonnage.server.engines.hf.attention.flash import FlashAttention
from tonnage.server.engines.hf.attention.flash_infer import FlashInferAttention
from tonnage.server.engines.hf.attention.flex import FlexAttention
from tonnage.server.engines.hf.attention.interface import candidates
from tonnage.server.engines.hf.batch import Batch
from tonnage.server.engines.hf.pool import PagedPool

CPU = torch.device("cpu")


def pool_of(block_size: int = 256, head_size: int = 64) -> PagedPool:
    groups = (KVGroup("full", (0,), None), KVGroup("sliding", (1,), 20))
    return PagedPool(KVLayout(groups, block_size, 1, 2, head_size, "bfloat16", 2), 4, CPU)


def limits_of(pool: PagedPool) -> Limits:
    return Limits(pool.layout, 3, 256, 4, 64)


def batch_of() -> Batch:
    table = np.array([[1]], np.int32)
    return Batch(
        token_ids=np.zeros(2, np.int64),
        positions=np.arange(2),
        query_start=np.array([0, 2]),
        kv_len=np.array([2]),
        slots=(np.array([256, 257]),) * 2,
        tables=(table,) * 2,
        logits_at=np.array([1]),
    )


def install(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> None:
    """Put a module with these members where an import of ``name`` finds it."""
    module = ModuleType(name)
    vars(module).update(members)
    monkeypatch.setitem(sys.modules, name, module)


def test_flash_attn_package_gets_cumulative_sequence_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "flash_attn", flash_attn_varlen_func=lambda **arguments: arguments)
    given: Any = flash.load_flash_attn()(seqused_k=torch.tensor([3, 2], dtype=torch.int32), causal=True)
    assert given["cu_seqlens_k"].tolist() == [0, 3, 5]
    assert given["cu_seqlens_k"].dtype == torch.int32
    assert given["causal"] is True


@pytest.mark.parametrize(("supported", "version"), [(True, 3), (False, 2)])
def test_vllms_flash_attention_uses_the_newest_version_that_the_gpu_supports(
    monkeypatch: pytest.MonkeyPatch, supported: bool, version: int
) -> None:
    install(
        monkeypatch, "vllm.vllm_flash_attn",
        flash_attn_varlen_func=lambda **arguments: arguments, is_fa_version_supported=lambda wanted: supported,
    )  # fmt: skip
    given: Any = flash.load_vllm()(causal=True)
    assert given == {"fa_version": version, "causal": True}


def test_flashinfer_has_one_wrapper_per_kv_group_and_one_shared_workspace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def wrapper(workspace: torch.Tensor, layout: str) -> SimpleNamespace:
        return SimpleNamespace(at=workspace, layout=layout)

    install(monkeypatch, "flashinfer", BatchPrefillWithPagedKVCacheWrapper=wrapper)
    wrappers = flash_infer.load(pool_of())
    assert [each.layout for each in wrappers] == ["NHD", "NHD"]
    assert wrappers[0].at is wrappers[1].at
    assert wrappers[0].at.numel() == FLASHINFER_WORKSPACE_BYTES


def test_each_kernel_name_creates_its_own_attention_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash, "load_vllm", lambda: None)
    monkeypatch.setattr(flash, "load_flash_attn", lambda: None)
    monkeypatch.setattr(flash_infer, "load", lambda pool: [None, None])
    pool = pool_of()
    made = {name: type(cuda.load(name, pool, limits_of(pool))(batch_of())) for name in cuda.KERNELS}
    assert made == {
        cuda.VLLM_FLASH: FlashAttention, cuda.FLASH: FlashAttention, cuda.FLASHINFER: FlashInferAttention,
        cuda.FLEX: FlexAttention,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("block_size", "head_size", "capability", "names"),
    [
        (256, 64, (9, 0), list(cuda.KERNELS)),
        (16, 64, (9, 0), [cuda.VLLM_FLASH, cuda.FLASHINFER, cuda.FLEX]),
        (16, 96, (8, 0), [cuda.VLLM_FLASH, cuda.FLEX]),
        (16, 64, (7, 5), [cuda.FLEX]),
        (8, 512, (9, 0), []),
    ],
)
def test_attention_kernels_are_offered_by_block_size_head_size_and_compute_capability(
    monkeypatch: pytest.MonkeyPatch,
    block_size: int,
    head_size: int,
    capability: tuple[int, int],
    names: list[str],
) -> None:
    monkeypatch.setattr(cuda, "_missing", lambda name: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert cuda.usable(pool_of(block_size, head_size), torch.bfloat16) == names


def test_reason_why_a_gpu_kernel_is_skipped_names_the_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "find_spec", lambda name: None)
    wanted = cuda.Wanted("bfloat16", "bfloat16", 16, 64)
    assert cuda.why_not(cuda.FLASHINFER, wanted, (9, 0)) == "flashinfer is not installed"
    assert cuda.why_not(cuda.VLLM_FLASH, wanted, (9, 0)) == "vllm is not installed"


def test_gpu_attention_kernels_are_tried_before_the_reference_implementation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = pool_of()
    on_gpu: Any = SimpleNamespace(tensor=SimpleNamespace(device=torch.device("cuda")), layout=real.layout)
    monkeypatch.setattr(cuda, "usable", lambda pool, dtype: [cuda.FLASHINFER, cuda.FLEX])
    found = candidates(on_gpu, 4, 1, torch.bfloat16, limits_of(real))
    assert [each.name for each in found] == [cuda.FLASHINFER, cuda.FLEX, "gather"]
