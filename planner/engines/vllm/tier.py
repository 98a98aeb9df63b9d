"""vLLM's KV offloading tiers: bytes, chunks and tokens that a connector keeps in host memory or on disk.

Named source files are from vLLM 0.32 and LMCache 0.5.6. A chunk holds the blocks of one KV cache group on all
ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from tonnage.planner.devices.catalogue import is_amd
from tonnage.planner.engines.runtime.host import HostInputs, pinned
from tonnage.planner.engines.vllm.kv_transfer import (
    CONFIG,
    LMCACHE,
    LMCACHE_MP,
    Connector,
    connector_of,
)
from tonnage.planner.errors import DeploymentError, UnsupportedArchitecture
from tonnage.planner.model.tier import KVTier, TierGroup, blocks_on_disk, index_bytes
from tonnage.planner.units import GiB, ceil_div, gib, parse_size

# First vLLM release whose workers share one region in /dev/shm (v1/kv_offload/cpu/shared_offload_region.py).
# Older releases pin one tensor per layer slot: 0.26 pinned 24 tensors per rank (vllm-project/vllm#53042).
SHARED_SINCE = (0, 30, 0)
# First vLLM release that, with a KV connector, keeps all layers of a model with one KV cache group in a single
# tensor (vllm.ai, 2026-01-08: blocks of 16 KB before 0.12, of 2 MB since).
_ONE_TENSOR = (0, 12, 0)
# Oldest vLLM release, of those whose source was read, that refuses to offload recurrent states if prefix
# caching is off (offloading/config.py).
_STATES_SINCE = (0, 32, 0)
_PAGE = 4096  # bytes to which a chunk is rounded up (SharedOffloadRegion.BLOCK_SIZE_ALIGNMENT)

# Types of secondary tiers (v1/kv_offload/tiering/factory.py).
_SECONDARY = ("fs", "obj", "p2p", "kvcr", "example", "tonnage")
# Defaults of SimpleCPUOffloadConnector: bytes in host memory, bytes on disk, slots of a disk buffer
# (simple_cpu_offload_connector.py).
_SIMPLE_HOST, _SIMPLE_DISK, _SIMPLE_SLOTS = 8 * GiB, 100 * GiB, 2
# Defaults of LMCache (v1/config.py) and of its server (v1/distributed/config.py): tokens per chunk, and GiB of
# host memory.
_LMCACHE_CHUNK, _LMCACHE_HOST = 256, 5.0


def tiers(hosted: HostInputs) -> tuple[KVTier, ...]:
    """Return the KV offloading tiers of one replica; empty without a connector that keeps blocks.

    Raises:
        DeploymentError: a flag or a setting of the connector is not understood.
        UnsupportedArchitecture: it is not known how this connector stores the model's blocks.
    """
    connector = connector_of(hosted.chosen.flags)
    if connector is None or not hosted.layout.groups:
        return ()
    others = {LMCACHE: _lmcache, LMCACHE_MP: _lmcache_server, "SimpleCPUOffloadConnector": _simple}
    return others.get(connector.name, _native)(hosted, connector)


# -- OffloadingConnector


def _native(hosted: HostInputs, connector: Connector) -> tuple[KVTier, ...]:
    kinds = {group.kind for group in hosted.layout.groups}
    cached = hosted.chosen.flags.enable_prefix_caching
    if "state" in kinds and len(kinds) > 1 and not cached and hosted.chosen.version >= _STATES_SINCE:
        raise DeploymentError(
            "vLLM does not offload the recurrent states of a hybrid model without prefix caching: their blocks "
            "then have another size than those of the attention layers",
            field=connector.field, hint="--enable-prefix-caching",
        )  # fmt: skip
    per_chunk = _blocks_per_chunk(hosted, connector)
    policy = connector.extra.get("eviction_policy", "lru")
    if policy not in ("lru", "arc") and "cache_policy_module_path" not in connector.extra:
        raise DeploymentError(
            f"eviction_policy {policy!r:.40} is neither lru nor arc", field=connector.field,
            hint="a policy of your own also needs cache_policy_module_path",
        )  # fmt: skip
    shared = hosted.chosen.version >= SHARED_SINCE and not is_amd(hosted.chosen.flags.gpu)
    host = (_region if shared else _tensors)(hosted, connector, per_chunk)
    return (host, *_secondary(hosted, connector, host, per_chunk))


def _blocks_per_chunk(hosted: HostInputs, connector: Connector) -> int:
    """Return the KV blocks per offloaded chunk, from the connector's blocks_per_chunk or block_size.

    The settings are read in offloading/config.py.
    """
    blocks, tokens = connector.size("blocks_per_chunk"), connector.size("block_size")
    if blocks is not None and tokens is not None:
        raise DeploymentError("has both block_size and blocks_per_chunk; give one", field=connector.field)
    if tokens is None:
        return blocks or 1
    sizes = {_group_tokens(hosted, place) for place in range(len(hosted.layout.groups))}
    if len(sizes) > 1:
        raise DeploymentError(
            f"block_size needs KV cache groups with equal blocks; this model's have {sorted(sizes)} tokens",
            field=connector.field, hint="give blocks_per_chunk",
        )  # fmt: skip
    block = sizes.pop()
    if tokens % block:
        raise DeploymentError(
            f"block_size {tokens} is no multiple of the pool's block of {block} tokens", field=connector.field,
            hint=f"{ceil_div(tokens, block) * block}",
        )  # fmt: skip
    return tokens // block


def _region(hosted: HostInputs, connector: Connector, per_chunk: int) -> KVTier:
    """Return the host KV tier in one region of /dev/shm, which all ranks map (CPUOffloadingSpec)."""
    asked = connector.size("cpu_bytes_to_use")
    if asked is None:
        raise DeploymentError(
            "cpu_bytes_to_use must be specified in kv_connector_extra_config", field=connector.field
        )
    copies = _copies(hosted)
    chunk = ceil_div(_rank_block(hosted) * copies * per_chunk, _PAGE) * _PAGE
    chunks = asked // chunk
    _check_chunks(chunks, asked, chunk, connector)
    held = chunk * chunks
    tokens = tokens_held(hosted, chunks, per_chunk)
    said = f"{chunks:,} blocks x {chunk:,} ({copies} {'copy' if copies == 1 else 'copies'}, whole pages)"
    if len(hosted.layout.groups) > 1:
        said += f", each for one of {len(hosted.layout.groups)} groups"
    said += f": {tokens:,} tokens of requests of {hosted.chosen.max_model_len:,}"
    # With pipeline parallelism, blocks differ in size between stages with different layers. The upper bound of
    # the region's size is then the requested cpu_bytes_to_use.
    high = held if hosted.chosen.flags.pipeline_parallel_size == 1 else asked
    return KVTier(
        connector.name, "host", asked, held, held, high, None, len(hosted.ranks), True, True, chunk, chunks,
        tokens, _groups(hosted, per_chunk), said, "v1/kv_offload/cpu/spec.py",
    )  # fmt: skip


def _tensors(hosted: HostInputs, connector: Connector, per_chunk: int) -> KVTier:
    """Return the host KV tier in pinned tensors of each rank, which PyTorch rounds up to powers of two.

    A rank has one tensor per layer slot of a block. Since 0.12, a model with a single group of full-attention
    layers has one tensor per rank, because the connector selects a layout with all layers in one block.
    """
    ranks, block = len(hosted.ranks), _rank_block(hosted) * per_chunk
    count, asked = connector.size("num_cpu_blocks"), connector.size("cpu_bytes_to_use")
    if count is not None and asked is not None:
        raise DeploymentError(
            "has both num_cpu_blocks and cpu_bytes_to_use; give one of them", field=connector.field
        )
    if count is None and asked is None:
        raise DeploymentError("needs cpu_bytes_to_use or num_cpu_blocks; give one", field=connector.field)
    chunks = count if count is not None else (asked or 0) // (block * ranks)
    _check_chunks(chunks, asked or 0, block * ranks, connector)
    layout, tensors = hosted.layout, hosted.layout.layer_slots
    if len(layout.groups) == 1 and layout.groups[0].kind == "full" and hosted.chosen.version >= _ONE_TENSOR:
        tensors = 1
    exact = chunks * block
    each = pinned_tensors(exact, tensors)
    said = (
        f"{chunks:,} blocks x {block:,} on each of {ranks} ranks, in {tensors} pinned "
        f"{'tensor' if tensors == 1 else 'tensors'} rounded up to powers of two"
    )
    return KVTier(
        connector.name, "host", asked, ranks * each, ranks * exact, 2 * ranks * exact, each, ranks, True, False,
        block * ranks, chunks, tokens_held(hosted, chunks, per_chunk), _groups(hosted, per_chunk), said,
        "1.92 times in vllm-project/vllm#53042",
    )  # fmt: skip


def pinned_tensors(size: int, tensors: int) -> int:
    """Return the bytes pinned for ``size`` bytes in equal tensors, each rounded up to a power of two."""
    return tensors * pinned(ceil_div(size, tensors))


def _check_chunks(chunks: int, asked: int, chunk: int, connector: Connector) -> None:
    if chunks < 1:
        raise DeploymentError(
            f"{asked:,} bytes hold no chunk of {chunk:,} bytes",
            field=connector.field,
            hint=f"at least {gib(chunk)}",
        )


def _secondary(hosted: HostInputs, connector: Connector, host: KVTier, per_chunk: int) -> tuple[KVTier, ...]:
    """Return the KV tiers behind the host tier, on disk or in an object store (v1/kv_offload/tiering).

    vLLM's own tiers of this kind have no upper bound.
    """
    asked = connector.extra.get("secondary_tiers", [])
    spec = connector.extra.get("spec_name", "CPUOffloadingSpec")
    if spec not in ("CPUOffloadingSpec", "TieringOffloadingSpec", "CpuTieringSpec"):
        raise DeploymentError(f"the planner does not know spec_name {spec!r:.60}", field=connector.field,
                              hint="CPUOffloadingSpec or TieringOffloadingSpec")  # fmt: skip
    if not isinstance(asked, list) or not all(isinstance(tier, dict) for tier in asked):
        raise DeploymentError("secondary_tiers is not a list of objects", field=connector.field)
    if asked and spec == "CPUOffloadingSpec":
        raise DeploymentError(
            "secondary_tiers have no effect without spec_name TieringOffloadingSpec", field=connector.field
        )
    found = []
    for tier in asked:
        kind = tier.get("type")
        if kind not in _SECONDARY:
            raise DeploymentError(f"secondary tier {kind!r:.60} is not one of {', '.join(_SECONDARY)}",
                                  field=connector.field)  # fmt: skip
        if kind == "fs" and not tier.get("root_dir"):
            raise DeploymentError("a secondary tier of type fs needs root_dir, a folder", field=connector.field)
        if kind == "tonnage":
            found.append(_bounded(hosted, connector, tier, host.chunk_bytes, per_chunk))
        if kind not in ("fs", "obj"):
            continue
        chunk = host.chunk_bytes  # fs/manager.py writes a chunk padded to whole pages
        found.append(
            KVTier(
                kind, "disk", None, None, 0, None, None, 1, False, False, chunk, None, None,
                _groups(hosted, per_chunk), f"a file of {chunk:,} bytes for each chunk",
                f"v1/kv_offload/tiering/{kind}/manager.py",
                note="vLLM removes no file of this tier: limit or clean its folder",
            )
        )  # fmt: skip
    return tuple(found)


def _bounded(
    hosted: HostInputs, connector: Connector, tier: Mapping[str, Any], chunk: int, per_chunk: int
) -> KVTier:
    """Return Tonnage's disk tier (docs/disk_tier.md); its setting ``size`` limits the bytes of its files."""
    if not tier.get("path") or not tier.get("size"):
        raise DeploymentError("a secondary tier of type tonnage needs path and size", field=connector.field)
    size = parse_size(str(tier["size"]), connector.field)
    chunks = blocks_on_disk(size, chunk)
    _check_chunks(chunks, size, chunk, connector)
    return KVTier(
        "tonnage", "disk", size, size, chunks * chunk, size, None, 1, False, False, chunk, chunks,
        tokens_held(hosted, chunks, per_chunk), _groups(hosted, per_chunk),
        f"{chunks:,} files of {chunk:,} bytes with header, pages and directories", "cache/disk/folder.py",
        index=index_bytes(chunks, tier.get("policy", "learned") == "learned"),
    )  # fmt: skip


# -- SimpleCPUOffloadConnector


def _simple(hosted: HostInputs, connector: Connector) -> tuple[KVTier, ...]:
    """Return the KV tiers of SimpleCPUOffloadConnector: pinned tensors on each rank, or files with buffers.

    The tensors are pinned after their allocation, so PyTorch does not round their size to a power of two
    (simple_kv_offload/worker.py).
    """
    backend = connector.extra.get("kv_offload_backend", "cpu")
    if backend not in ("cpu", "disk"):
        raise DeploymentError(f"kv_offload_backend {backend!r:.40} is neither cpu nor disk", field=CONFIG)
    ranks, block = len(hosted.ranks), _rank_block(hosted)
    if not hosted.chosen.flags.enable_prefix_caching:
        raise DeploymentError(
            "SimpleCPUOffloadConnector keeps nothing without prefix caching", field=CONFIG,
            hint="--enable-prefix-caching",
        )  # fmt: skip
    asked = connector.size("cpu_bytes_to_use", _SIMPLE_HOST) or 0
    rank = connector.size("cpu_bytes_to_use_per_rank") or asked // ranks
    if backend == "disk":
        if not connector.extra.get("disk_path"):
            raise DeploymentError('kv_offload_backend "disk" requires disk_path', field=CONFIG)
        rank = connector.size("disk_capacity_bytes", _SIMPLE_DISK) or 0
    chunks = max(1, rank // block)
    held = chunks * block
    on_rank = f"{block:,} on each of {ranks} ranks"
    tier = KVTier(
        connector.name, "host", rank * ranks, held * ranks, held * ranks, held * ranks, held, ranks, True,
        False, block * ranks, chunks, tokens_held(hosted, chunks, 1), _groups(hosted, 1),
        f"{chunks:,} blocks x {on_rank}", "v1/simple_kv_offload/worker.py",
    )  # fmt: skip
    if backend == "cpu":
        return (tier,)
    slots = connector.size("disk_buffer_slots", _SIMPLE_SLOTS) or 1
    staged = 2 * slots * block  # one buffer for writes, one for reads (disk_backend.py)
    formula = f"a file of {chunks:,} blocks x {block:,} of each of {ranks} ranks"
    return (
        replace(tier, medium="disk", pinned=False, formula=formula),
        KVTier(
            "staging buffers", "host", None, staged * ranks, staged * ranks, staged * ranks, staged, ranks,
            True, False, block * ranks, None, None, (), f"2 x {slots} blocks x {on_rank}",
            "v1/simple_kv_offload/disk_backend.py",
        ),
    )  # fmt: skip


# -- LMCache


def _lmcache(hosted: HostInputs, connector: Connector) -> tuple[KVTier, ...]:
    """Return the KV tiers that LMCache keeps in the engine; max_local_cpu_size is in GiB per rank.

    With MLA, only the first rank stores blocks, because all ranks have the same latents (save_only_first_rank
    in cache_engine.py).
    """
    token = _token_bytes(hosted)
    ranks = 1 if _latent(hosted) else len(hosted.ranks)
    size = _gibibytes(connector, "lmcache.max_local_cpu_size", _LMCACHE_HOST)
    disk = _gibibytes(connector, "lmcache.max_local_disk_size", 0.0)
    tokens = connector.size("lmcache.chunk_size", _LMCACHE_CHUNK) or _LMCACHE_CHUNK
    chunk, found = token * tokens, []
    if not size:
        raise DeploymentError(
            "lmcache.max_local_cpu_size is 0, but LMCache copies every block through this memory", field=CONFIG
        )
    whole = (TierGroup(hosted.layout.groups[0].kind, tokens, ceil_div(hosted.chosen.max_model_len, tokens)),)
    media: tuple[tuple[Literal["host", "disk"], int], ...] = (("host", size), ("disk", disk))
    for medium, each in media:
        if not each:
            continue
        chunks = each // chunk
        held = each if medium == "host" else chunks * chunk
        found.append(
            KVTier(
                "LMCache", medium, each * ranks, held * ranks, held * ranks if medium == "host" else 0,
                held * ranks, held, ranks, medium == "host", False, chunk * ranks, chunks, chunks * tokens,
                whole, f"{ranks} ranks x {each:,}, {chunks:,} chunks of {tokens} tokens",
                "v1/storage_backend/local_cpu_backend.py" if medium == "host" else
                "v1/storage_backend/local_disk_backend.py",
            )
        )  # fmt: skip
    if disk and not connector.extra.get("lmcache.local_disk"):
        raise DeploymentError("lmcache.max_local_disk_size needs lmcache.local_disk, a folder", field=CONFIG)
    return tuple(found)


def _gibibytes(connector: Connector, key: str, default: float) -> int:
    """Return the bytes of LMCache's setting ``key``, which is given in GiB."""
    value = connector.extra.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1 << 30:
        raise DeploymentError(f"{key} is {value!r:.60}, not a size in GiB", field=connector.field)
    return int(value * GiB)


def _lmcache_server(hosted: HostInputs, connector: Connector) -> tuple[KVTier, ...]:
    """Return the first-level KV tier of an LMCache server; --l1-size-gb is in GiB for all ranks together."""
    size = connector.extra.get("l1_size")
    if size is None:
        raise DeploymentError(
            f"{LMCACHE_MP} keeps its blocks in LMCache's server, whose --l1-size-gb is not in the JSON",
            field=CONFIG, hint="--kv-offloading-backend lmcache --kv-offloading-size GIB",
        )  # fmt: skip
    copies = 1 if _latent(hosted) else len(hosted.ranks)
    chunk = _token_bytes(hosted) * _LMCACHE_CHUNK * copies
    chunks = size // chunk
    _check_chunks(chunks, size, chunk, connector)
    group = hosted.layout.groups[0]
    return (
        KVTier(
            "LMCache server", "host", size, size, 0, size, None, 1, True, False, chunk, chunks,
            chunks * _LMCACHE_CHUNK,
            (TierGroup(group.kind, _LMCACHE_CHUNK, ceil_div(hosted.chosen.max_model_len, _LMCACHE_CHUNK)),),
            f"{size:,} of the server, {chunks:,} chunks of {_LMCACHE_CHUNK} tokens of {copies} ranks",
            "lmcache/v1/distributed/config.py", outside=True,
            note=f"lmcache server --l1-size-gb {size / GiB:g} --eviction-policy LRU; vLLM ignores the size",
        ),
    )  # fmt: skip


def _token_bytes(hosted: HostInputs) -> int:
    """Return the KV cache bytes of one token on one rank, for a model whose layers all keep every token."""
    if len(hosted.layout.groups) > 1 or hosted.layout.groups[0].kind not in ("full", "mla"):
        raise UnsupportedArchitecture(
            "the planner does not know how LMCache stores sliding windows and recurrent states",
            field="layer_types", hint="--kv-offloading-backend native",
        )  # fmt: skip
    return ceil_div(_rank_block(hosted), _group_tokens(hosted, 0))


# -- what chunks hold


def _rank_block(hosted: HostInputs) -> int:
    return hosted.block_bytes // len(hosted.ranks)


def _latent(hosted: HostInputs) -> bool:
    return all(group.kind == "mla" for group in hosted.layout.groups)


def _copies(hosted: HostInputs) -> int:
    """Return the number of ranks whose KV data a chunk stores: 1 if all have the same MLA latents, else all.

    The rule is replicated_layout in kv_connector/v1/offloading/config.py.
    """
    flags, ranks = hosted.chosen.flags, len(hosted.ranks)
    once = (
        _latent(hosted) and ranks == flags.tensor_parallel_size > 1 and flags.decode_context_parallel_size == 1
    )
    return 1 if once else ranks


def _group_tokens(hosted: HostInputs, place: int) -> int:
    group = hosted.layout.groups[place]
    return (group.block_size or hosted.layout.block_size) * hosted.chosen.flags.decode_context_parallel_size


def _groups(hosted: HostInputs, per_chunk: int) -> tuple[TierGroup, ...]:
    """Return the number of offloaded chunks of a request of max_model_len tokens, per KV cache group.

    A group of sliding-window layers has the chunks of its window, a group of recurrent states one chunk.
    """
    found = []
    for place, group in enumerate(hosted.layout.groups):
        tokens = _group_tokens(hosted, place) * per_chunk
        whole = ceil_div(hosted.chosen.max_model_len, tokens)
        most = 1 if group.kind == "state" else ceil_div(group.window, tokens) if group.window else whole
        found.append(TierGroup(group.kind, tokens, min(whole, most)))
    return tuple(found)


def tokens_held(hosted: HostInputs, chunks: int, per_chunk: int = 1) -> int:
    """Return the tokens in ``chunks`` chunks of offloaded KV blocks, for requests of max_model_len tokens.

    Each chunk belongs to one KV cache group. vLLM 0.33 counts the same way (_kv_cache_size_tokens in
    v1/kv_offload/cpu/common.py).
    """
    each = sum(group.chunks for group in _groups(hosted, per_chunk))
    return chunks * hosted.chosen.max_model_len // each
