"""vLLM's KV pool by version: pages per layer, block size, blocks per sequence, and the logged capacity.

The source is vLLM 0.32.0 (v1/core/kv_cache_utils.py, v1/kv_cache_interface.py, platforms/cpu.py,
platforms/interface.py, model_executor/layers/mamba/mamba_utils.py). Older versions follow their published
start-up logs (tests/data/field_reports.jsonl) and the pull requests named below.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import lcm, prod

from tonnage.planner.engines.grouping import Groups, LayerPages, block_bytes, group_pages
from tonnage.planner.engines.pool import Demand, PoolCapacity, PoolSpec, expanded_heads, heads_per_rank
from tonnage.planner.engines.version import Version
from tonnage.planner.engines.vllm import kv_formats
from tonnage.planner.engines.vllm.compressed import BLOCK, compressed_groups
from tonnage.planner.engines.vllm.versions import VersionRules, rules
from tonnage.planner.errors import UnsupportedArchitecture
from tonnage.planner.families.registry import family_of
from tonnage.planner.model.architecture import Architecture, CacheLayer, StateTensor
from tonnage.planner.model.dtypes import DTYPE_BYTES
from tonnage.planner.model.layout import KVGroup, KVLayout
from tonnage.planner.units import ceil_div

# Device -> tokens of the attention kernel's smallest block: CPU attention (v1/attention/backends/cpu_attn.py),
# and FlashAttention on GPUs.
KERNEL_BLOCK = {"cpu": 32, "cuda": 16}
# Tokens per block of the CPU's MLA kernel on processors without AMX, the only size that it supports there. With
# AMX, a block has 128 tokens (platforms/cpu.py).
CPU_MLA_BLOCK = 16

# Device -> default tokens per block (platforms/cpu.py, and DEFAULT_BLOCK_SIZE in config/cache.py).
DEFAULT_BLOCK = {"cpu": 128, "cuda": 16}
_MAMBA1_CHUNK = 2048  # assumed chunk size in tokens of Mamba-1 (get_mamba_chunk_size in config/model.py)
HYBRID_MLA_BLOCK = 128  # divisor of the block size of hybrid models with MLA (platforms/interface.py)

_WHOLE_PROMPTS = (
    "vLLM on a CPU without AMX runs latent attention without chunked prefill and prefix caching, "
    "and a step takes up to max(max_model_len, 2048) tokens"
)

# Keys of DeepSeek's sparse indexer are fp8 with one fp32 scale per 128 elements
# (v1/attention/backends/mla/indexer.py).
_INDEX_GROUP = 128


@dataclass(frozen=True, slots=True)
class VLLMDeployment:
    """The settings of a deployment that determine vLLM's KV cache pool.

    A block_size of None is vLLM's default.
    """

    device: str
    version: Version
    dtype_bytes: int
    kv_dtype: str
    block_size: int | None
    max_num_batched_tokens: int
    prefix_caching: bool | None
    tensor_parallel: int = 1
    context_parallel: int = 1
    speculative_tokens: int = 0
    amx: bool = False
    every_state: bool = False  # whether prefix caching keeps a Mamba state for each block of a prompt
    ssm_dtype: str | None = None  # --mamba-ssm-cache-dtype; None keeps the model's dtype
    native_layers: frozenset[int] = frozenset()  # layers whose cache is not in the packed format
    rotary: int = 0  # number of rotated dimensions of a key
    float32_states: bool = False  # whether recurrent states are float32


def build_pool(architecture: Architecture, flags: VLLMDeployment) -> PoolSpec:
    """Return the pool of KV cache blocks of one rank.

    Raises:
        UnsupportedArchitecture: vLLM, or this planner, cannot lay out the model's cache.
    """
    if not architecture.cache_layers:
        raise UnsupportedArchitecture(
            f"{architecture.class_name} keeps no KV cache: there is no pool to size", field="model_type"
        )
    if any(layer.compression > 1 for layer in architecture.cache_layers):
        return _compressed_pool(architecture, flags)
    known = family_of(architecture.model_type).vllm
    if known.alternating and any(
        (layer.kind == "sliding") != (layer.layer % 2 == 0) for layer in architecture.cache_layers
    ):
        raise UnsupportedArchitecture(
            f"vLLM uses a sliding window in every second layer of {architecture.model_type}, unlike the config",
            field="layer_types",
        )
    if known.float32_states:
        flags = replace(flags, float32_states=True)
    if known.expanded_mla:
        architecture = _expanded(architecture)
    flags = replace(
        flags,
        native_layers=kv_formats.boundary_layers(architecture, flags.kv_dtype),
        rotary=architecture.rotary.dim if architecture.rotary else 0,
    )
    block, notes = _block_size(architecture, flags)
    if flags.native_layers:
        block = _shared_block(architecture, flags, block)
    pages = [page for layer in architecture.cache_layers for page in _pages(layer, flags, block)]
    states = {page.page_bytes for page in pages if page.kind == "state"}
    token = _attention_token_bytes(architecture, flags)
    if states and token:
        block = _aligned_block(architecture, flags, block, max(states), token)
        pages = [page for layer in architecture.cache_layers for page in _pages(layer, flags, block)]
        pages = [
            replace(page, page_bytes=max(page.page_bytes, block * token)) if page.kind == "state" else page
            for page in pages
        ]
    version = rules(flags.version)
    if not version.hybrid_groups:
        pages = [_promoted(page) for page in pages]
    groups = group_pages(pages, pads=version.padded_pages)
    sizes = tuple(tuple(page.page_bytes for page in group) for group in groups)
    return PoolSpec(_layout(groups, block, flags), _demands(groups, flags, version), notes, sizes)


def _compressed_pool(architecture: Architecture, flags: VLLMDeployment) -> PoolSpec:

    groups = compressed_groups(architecture, flags.version, flags.kv_dtype)
    notes: tuple[str, ...] = ("vLLM keeps this model's cache in its fp8_ds_mla format, whatever the dtype",)
    if flags.device == "cpu" and not flags.amx:
        notes += (_WHOLE_PROMPTS,)
    if flags.block_size not in (None, BLOCK):
        notes += (f"vLLM has blocks of {BLOCK} tokens for this model only",)
    layout = _layout(groups, BLOCK, replace(flags, kv_dtype="fp8"))
    sizes = tuple(tuple(page.page_bytes for page in group) for group in groups)
    return PoolSpec(layout, _demands(groups, flags, rules(flags.version)), notes, sizes)


def capacity(pool: PoolSpec, num_blocks: int, max_model_len: int, version: Version) -> PoolCapacity:
    """Return the KV cache pool's capacity as vLLM's start-up log prints it.

    vLLM counts the null block (block 0) among the blocks.
    """
    per_sequence = pool.sequence_blocks(max_model_len)
    concurrency = num_blocks / per_sequence
    if rules(version).token_line == "concurrency":
        tokens = int(concurrency * max_model_len)
    else:
        smallest = min(demand.block_size for demand in pool.demands)
        shards = max(demand.shards for demand in pool.demands)
        tokens = num_blocks // len(pool.demands) * smallest * shards
    return PoolCapacity(num_blocks, max(0, num_blocks - 1), per_sequence, tokens, concurrency)


def _expanded(architecture: Architecture) -> Architecture:
    key = expanded_heads(architecture).key
    layers = tuple(
        replace(layer, kind="full", kv_heads=architecture.heads, head_size=key, value_head_size=key)
        for layer in architecture.cache_layers
    )
    return replace(architecture, cache_layers=layers)


def _block_size(architecture: Architecture, flags: VLLMDeployment) -> tuple[int, tuple[str, ...]]:
    """Return the tokens per KV cache block, and notes, before vLLM enlarges blocks of hybrid models."""
    mla = any(layer.kind == "mla" for layer in architecture.cache_layers)
    if mla and flags.device == "cpu" and not flags.amx:
        notes: tuple[str, ...] = (_WHOLE_PROMPTS,)
        if flags.block_size not in (None, CPU_MLA_BLOCK):
            notes += (f"vLLM's MLA kernel on a CPU without AMX has blocks of {CPU_MLA_BLOCK} tokens only",)
        return CPU_MLA_BLOCK, notes
    if flags.block_size is not None:
        return flags.block_size, ()
    if mla and flags.device == "cuda":
        # FlashMLA has blocks of 64 tokens (platforms/cuda.py; v1/attention/backends/mla/flashmla.py).
        return 64, ()
    return DEFAULT_BLOCK[flags.device], ()


def _attention_token_bytes(architecture: Architecture, flags: VLLMDeployment) -> int:
    """Return the KV cache bytes per token of the first attention layer, or 0 without an attention layer.

    vLLM uses these bytes to choose the block size of hybrid models, whose blocks must hold a recurrent state.
    """
    layers = (layer for layer in architecture.cache_layers if layer.kind in ("full", "sliding", "mla"))
    return next((_entry_bytes(layer, flags) for layer in layers), 0)


def _aligned_block(
    architecture: Architecture, flags: VLLMDeployment, block: int, state: int, token: int
) -> int:
    """Return the smallest block size whose attention page holds the largest recurrent state.

    The rule is _align_hybrid_block_size. ``block`` is the block size before alignment, ``state`` the bytes of
    the state, ``token`` the bytes per token of an attention layer.
    """
    step = _kernel_block(flags)
    if flags.device == "cpu" or flags.block_size is not None:
        step = max(step, block)
    if any(layer.kind == "mla" for layer in architecture.cache_layers):
        step = max(step, HYBRID_MLA_BLOCK)
    if _keeps_every_state(architecture.cache_layers, flags):
        chunks = (state.chunk or _MAMBA1_CHUNK for layer in architecture.cache_layers for state in layer.states
                  if state.name == "ssm")  # fmt: skip
        step = lcm(next(chunks), step)
    return max(block, step * ceil_div(state, step * token))


def _kernel_block(flags: VLLMDeployment) -> int:
    """Return the tokens in the attention kernel's smallest block, 16 before 0.29 (cpu_attn.py)."""
    return 16 if flags.version < (0, 29, 0) else KERNEL_BLOCK[flags.device]


def _keeps_every_state(layers: tuple[CacheLayer, ...], flags: VLLMDeployment) -> bool:
    """Return whether a sequence keeps one recurrent state per block of tokens.

    Mamba layers do so with prefix caching and mamba_cache_mode "all". Otherwise a sequence keeps a few states
    only.
    """
    mamba = any(state.name == "ssm" for layer in layers for state in layer.states)
    return mamba and flags.every_state and _caches_states(flags)


def _caches_states(flags: VLLMDeployment) -> bool:
    wanted = flags.prefix_caching
    return rules(flags.version).hybrid_prefix_caching if wanted is None else wanted


def _shared_block(architecture: Architecture, flags: VLLMDeployment, block: int) -> int:
    """Return the tokens per block with a packed KV cache format, if some layers are cached unpacked.

    These layers cache keys and values in the model's own dtype. The result is the smallest block size for which
    a packed page has at least the bytes of an unpacked page of one kernel block. The rule is
    _align_heterogeneous_kv_block_size. vLLM computes both page sizes with the backend of the first layer. That
    layer is unpacked, so its backend counts a packed page with one byte per value.
    """
    layer = next(layer for layer in architecture.cache_layers if layer.kind == "full")
    values = heads_per_rank(layer.kv_heads, flags.tensor_parallel) * 2 * layer.head_size
    kernel = KERNEL_BLOCK[flags.device]
    step = max(kernel, block)
    return max(block, step * ceil_div(values * flags.dtype_bytes * kernel, step * values))


def _entry_bytes(layer: CacheLayer, flags: VLLMDeployment) -> int:
    """Return the KV cache bytes of one token in one layer on one rank."""
    if layer.kind == "mla":
        return kv_formats.latent_bytes(layer, flags.kv_dtype)
    value = layer.head_size if layer.value_head_size is None else layer.value_head_size
    heads = heads_per_rank(layer.kv_heads, flags.tensor_parallel)
    if layer.layer in flags.native_layers:
        return heads * (layer.head_size + value) * flags.dtype_bytes
    return heads * kv_formats.head_bytes(flags.kv_dtype, layer.head_size, value, flags.rotary)


def _pages(layer: CacheLayer, flags: VLLMDeployment, block: int) -> list[LayerPages]:
    """Return the KV cache pages that one layer registers; none if it reads another layer's cache."""
    if layer.shares is not None:
        return []
    if layer.kind == "state":
        size = sum(_state_bytes(state, flags) for state in layer.states)
        shapes = tuple(state.shape for state in layer.states)
        return [LayerPages(layer.layer, "state", block, size, shapes, None, _state_blocks(layer, flags))]
    if layer.kind == "sliding" and rules(flags.version).sliding_kernel_block:
        block = min(block, _kernel_block(flags))
    entry = _entry_bytes(layer, flags)
    shape = (layer.kv_heads, layer.head_size, layer.value_head_size)
    fixed = None
    if layer.kind == "cross":
        fixed = ceil_div(layer.source_tokens or 1, block)
    pages = [LayerPages(layer.layer, layer.kind, block, block * entry, shape, layer.window, fixed)]
    if layer.index_size:
        key = layer.index_size + 4 * (layer.index_size // _INDEX_GROUP)
        pages.append(LayerPages(layer.layer, "mla", block, block * key, ("indexer", layer.index_size)))
    return pages


def _state_bytes(state: StateTensor, flags: VLLMDeployment) -> int:
    """Return the bytes of a recurrent state on one rank.

    The convolution has one more column per speculative token (conv_kernel - 1 + num_spec in mamba_utils.py).
    """
    shape = list(state.shape)
    if state.name.startswith("conv"):
        shape[0] += flags.speculative_tokens
    elements = prod(shape)
    if state.shard_dim is not None:
        elements = ceil_div(elements, flags.tensor_parallel)
    if flags.ssm_dtype is not None and state.name in ("ssm", "recurrent"):
        return elements * DTYPE_BYTES[flags.ssm_dtype]
    if state.dtype is not None:
        return elements * DTYPE_BYTES[state.dtype]
    temporal = not state.name.startswith("conv")
    return elements * (4 if temporal and flags.float32_states else flags.dtype_bytes)


def _state_blocks(layer: CacheLayer, flags: VLLMDeployment) -> int | None:
    """Return the number of blocks for a sequence's recurrent states, None for one per block of tokens.

    Without prefix caching, a sequence has one state. With prefix caching in "align" mode, it has two: the
    running state and the state at the end of the last whole block. Mamba-2 adds a checkpoint of the prefill,
    and each speculative token adds one state.
    """
    if not _caches_states(flags):
        return 1 + flags.speculative_tokens
    if _keeps_every_state((layer,), flags):
        return None
    checkpoint = any(state.name == "ssm" and len(state.shape) == 3 for state in layer.states)
    return 2 + flags.speculative_tokens + int(checkpoint and rules(flags.version).prefill_checkpoint)


def _promoted(page: LayerPages) -> LayerPages:
    """Return the KV cache page of a sliding or chunked layer, changed to that of a full-attention layer.

    Some vLLM versions keep every token in sliding layers, so they treat them as full layers. The rule is
    unify_hybrid_kv_cache_specs.
    """
    return replace(page, kind="full", window=None) if page.kind in ("sliding", "chunked") else page


def _layout(groups: Groups, block: int, flags: VLLMDeployment) -> KVLayout:
    """Return the KV cache layout: a slot per layer if all pages have equal bytes, else a slot per group."""
    sizes = {page.page_bytes for group in groups for page in group}
    slots, size = max(len(group) for group in groups), max(sizes)
    if len(sizes) > 1:
        slots, size = 1, block_bytes(groups)
    first = groups[0][0]
    plain = next((p for group in groups for p in group if p.kind in ("full", "sliding", "chunked")), first)
    heads, head = (
        (plain.shape[0], plain.shape[1]) if plain.kind in ("full", "sliding", "chunked", "mla") else (0, 0)
    )
    return KVLayout(
        groups=tuple(
            KVGroup(
                group[0].kind,
                tuple(page.layer for page in group),
                group[0].window,
                group[0].block_size if group[0].block_size != block else None,
            )
            for group in groups
        ),
        block_size=block,
        layer_slots=slots,
        kv_heads=heads if isinstance(heads, int) else 0,
        head_size=head if isinstance(head, int) else 0,
        dtype=flags.kv_dtype,
        dtype_bytes=kv_formats.PLAIN.get(flags.kv_dtype, 1),  # packed formats are stored as uint8
        page_bytes=size,
    )


def _demands(groups: Groups, flags: VLLMDeployment, version: VersionRules) -> tuple[Demand, ...]:
    batches = version.in_flight_batches if flags.device != "cpu" else 1
    in_flight = flags.max_num_batched_tokens * batches
    out = []
    for group in groups:
        page = group[0]
        if page.fixed is not None:
            out.append(Demand(page.block_size, fixed=page.fixed))
        elif page.kind == "sliding":
            # A sequence needs one more block because its window may begin inside a block (SlidingWindowSpec).
            out.append(Demand(page.block_size, most=(page.window or 1) - 1 + in_flight, extra=1))
        elif page.kind == "chunked":
            out.append(Demand(page.block_size, most=(page.window or 1) + in_flight))
        elif page.kind == "state":
            out.append(Demand(page.block_size, extra=flags.speculative_tokens))
        else:
            out.append(Demand(page.block_size, shards=flags.context_parallel))
    return tuple(out)
