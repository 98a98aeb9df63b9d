"""Selection of an attention kernel for a GPU: the first of `KERNELS` that is installed and can read the pool.

No kernel here has run on a GPU in this project yet. The tests run each kernel on a CPU with a stand-in for its
arithmetic, the reference implementation. FlexAttention runs its own CPU code. At every start the self-check
(``model.selfcheck``) compares the selected kernel with the model's own attention on the real device. If they
differ, the next kernel is tried.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch

from tonnage.cache.admission import Limits
from tonnage.server.engines.hf.attention.gather import Attention, Backend
from tonnage.server.engines.hf.batch import Batch
from tonnage.server.engines.hf.pool import PagedPool

VLLM_FLASH, FLASH, FLASHINFER, FLEX = "FlashAttention of vLLM", "FlashAttention", "FlashInfer", "FlexAttention"
KERNELS = (VLLM_FLASH, FLASH, FLASHINFER, FLEX)

# For each kernel, the number of tokens of which the block size must be a multiple. flash_attn 2:
# csrc/flash_attn/flash_api.cpp (mha_varlen_fwd), "Paged KV cache block size must be divisible by 256". vLLM's
# fork of flash_attn needs 16. FlexAttention needs 16 keys for Triton's tl.dot.
BLOCK_MULTIPLE = {VLLM_FLASH: 16, FLASH: 256, FLASHINFER: 1, FLEX: 16}
LARGEST_HEAD = 256  # upper bound of the head size in flash_api.cpp ("head dimension at most 256")
FLASHINFER_HEADS = (64, 128, 256)  # head sizes with which FlashInfer's wheels and JIT compiler are tested
HALVES = ("float16", "bfloat16")


@dataclass(frozen=True, slots=True)
class Wanted:
    """The properties of model and KV pool that a kernel must support: dtypes, block size and head size.

    Attributes:
        dtype: name of the dtype in which the model computes.
        stored: name of the dtype in which the pool stores K and V.
        block_size: tokens per block.
        head_size: values per head.
    """

    dtype: str
    stored: str
    block_size: int
    head_size: int


def why_not(name: str, wanted: Wanted, capability: tuple[int, int]) -> str | None:
    """Return why the attention kernel ``name`` cannot run on a GPU of this capability, or None if it can."""
    missing = _missing(name)
    if missing:
        return missing
    # Triton needs compute capability 7.0; FlashAttention 2 and bfloat16 need 8.0.
    least = (7, 0) if name == FLEX else (8, 0)
    if capability < least:
        return f"needs compute capability {least[0]}.{least[1]}, this is {capability[0]}.{capability[1]}"
    if wanted.stored != wanted.dtype:
        return f"reads K and V as the model computes ({wanted.dtype}), they are stored as {wanted.stored}"
    if wanted.dtype not in HALVES and name != FLEX:
        return f"computes in {' or '.join(HALVES)}, not {wanted.dtype}"
    multiple = BLOCK_MULTIPLE[name]
    if wanted.block_size % multiple:
        return f"needs blocks of a multiple of {multiple} tokens, not {wanted.block_size}"
    size = wanted.head_size
    if name == FLASHINFER and size not in FLASHINFER_HEADS:
        return f"serves head sizes {', '.join(map(str, FLASHINFER_HEADS))}, not {size}"
    if name != FLASHINFER and (size % 8 or size < 16 or size > LARGEST_HEAD):
        return f"serves head sizes 16 to {LARGEST_HEAD} in steps of 8, not {size}"
    return None


def _missing(name: str) -> str | None:
    if name == VLLM_FLASH:
        spec = find_spec("vllm")
        folders = list(spec.submodule_search_locations or ()) if spec else []
        if any(list(Path(folder).glob("vllm_flash_attn/_vllm_fa?_C*")) for folder in folders):
            return None
        return "vllm is built for another device" if spec else "vllm is not installed"
    module = {FLASH: "flash_attn", FLASHINFER: "flashinfer", FLEX: "triton"}[name]
    return None if find_spec(module) else f"{module} is not installed"


def load(name: str, pool: PagedPool, limits: Limits) -> Backend:
    """Load an attention kernel; return a function that makes the attention of a step from its batch.

    Raises:
        Exception: any error, because a broken installation may raise any.
    """
    # Imported here, because ``flex`` imports torch's compiler.
    from tonnage.server.engines.hf.attention import flash, flash_infer, flex

    if name == FLASHINFER:
        wrappers = flash_infer.load(pool)
        return lambda batch: flash_infer.FlashInferAttention(batch, pool, wrappers)
    if name == FLEX:
        buffers = flex.Buffers(pool, limits)
        return lambda batch: flex.FlexAttention(batch, pool, buffers)
    kernel = flash.load_vllm() if name == VLLM_FLASH else flash.load_flash_attn()

    def flash_attention(batch: Batch) -> Attention:
        return flash.FlashAttention(batch, pool, kernel)

    return flash_attention


def usable(pool: PagedPool, dtype: torch.dtype) -> list[str]:
    """Return the names of the attention kernels that can read this KV pool on its device, best first."""
    layout = pool.layout
    computed, stored = (str(kind).removeprefix("torch.") for kind in (dtype, pool.dtype))
    wanted = Wanted(computed, stored, layout.block_size, layout.head_size)
    capability = torch.cuda.get_device_capability(pool.tensor.device)
    return [name for name in KERNELS if why_not(name, wanted, capability) is None]
