"""HiCache, SGLang's KV tier in host memory and in files: bytes, tokens and state slots of each rank.

Each rank has its own pools in host memory: one for the tokens of full attention, one for sliding windows, one
for recurrent states. --hicache-ratio is the number of host slots per device slot, for each pool. --hicache-size
is in GB per rank and is divided among the host pools in proportion to the bytes of the device pools. Sources:
mem_cache/pool_host/base.py, mamba.py and hybrid_cache/hybrid_pool_assembler.py of 0.5.23, memory_pool_host.py
of 0.5.9.
"""

from __future__ import annotations

from tonnage.planner.engines import sglang_states as states
from tonnage.planner.engines.runtime.host import HostInputs
from tonnage.planner.errors import DeploymentError, UnsupportedArchitecture
from tonnage.planner.model.tier import KVTier, TierGroup
from tonnage.planner.units import ceil_div

_RATIO = 2.0  # SGLang's default of --hicache-ratio
_GB = 10**9
# Oldest SGLang releases, of those whose source was read, that keep MLA latents in the host memory of one rank
# only (mem_cache/mla_host_dedup.py), and whose default of --hicache-mem-layout is page_first.
_ONE_COPY, _PAGE_FIRST = (0, 5, 23), (0, 5, 23)


def tiers(hosted: HostInputs, full: int, sliding: int, slot: int) -> tuple[KVTier, ...]:
    """Return HiCache's tiers of one replica, for a deployment with --enable-hierarchical-cache.

    Args:
        hosted: The sized plan.
        full: Bytes per token on one rank in layers that keep every token.
        sliding: Bytes per token on one rank in sliding-window layers.
        slot: Bytes of one state slot on one rank.

    Raises:
        DeploymentError: the flags contradict each other or the pool.
        UnsupportedArchitecture: HiCache's pools are not known for this model.
    """
    flags = hosted.chosen.flags
    _check(hosted, slot)
    ratio = _RATIO if flags.hicache_ratio is None else float(flags.hicache_ratio)
    page, tokens = hosted.chosen.block_size, hosted.tokens
    windows = int(tokens * flags.swa_full_tokens_ratio) if full and sliding else tokens if sliding else 0
    slots = 0 if not slot else hosted.apart // slot - states.padding(hosted.chosen.version)
    # For each pool: kind of its layers, slots in the device pool, bytes per slot, slots per page.
    pools = [
        pool for pool in (("full", tokens, full, page), ("sliding", windows, sliding, page),
                          ("state", slots, slot, 1)) if pool[2]
    ]  # fmt: skip
    # Bytes of all device pools. The sum is 0 if the weights leave no memory for them; 1 avoids a division by 0.
    device = max(1, sum(count * size for _, count, size, _ in pools))
    held, rank, parts = {}, 0, []
    for kind, count, size, paged in pools:
        if flags.hicache_size is None:
            wanted = int(count * ratio)
        else:
            wanted = int(flags.hicache_size * (count * size / device) * _GB // size)
        held[kind] = (wanted // paged + 1) * paged  # SGLang adds one page of padding to a host pool
        rank += held[kind] * size
        parts.append(f"{held[kind]:,} {'slots' if kind == 'state' else 'tokens'} x {size:,} ({kind})")
    latent = all(layer.kind == "mla" for layer in hosted.architecture.cache_layers if layer.kind != "state")
    once = latent and not slot and hosted.chosen.version >= _ONE_COPY
    ranks = 1 if once else len(hosted.ranks)
    low = high = rank
    # With --hicache-ratio, the host pools are proportional to the device pool, and so are their bounds.
    if flags.hicache_size is None and tokens:
        low, high = (rank * bound // tokens for bound in hosted.token_bounds)
    kept = held.get("full", held.get("sliding", 0))
    groups = tuple(
        TierGroup(kind, paged, 1 if kind == "state" else ceil_div(hosted.chosen.max_model_len, paged))
        for kind, _, _, paged in pools
    )
    asked = None if flags.hicache_size is None else flags.hicache_size * _GB * ranks
    chunk = (full or sliding) * page * ranks
    note = "the pod's memory limit needs this on top of what SGLang takes besides, which is not known"
    if slot:
        note = f"of it {held['state'] * slot * ranks:,} bytes for {held['state']:,} states a rank; {note}"
    layout = flags.hicache_mem_layout
    if layout == "auto":
        layout = "page_first" if hosted.chosen.version >= _PAGE_FIRST else "layer_first"
    host = KVTier(
        "HiCache", "host", asked, rank * ranks, low * ranks, high * ranks, rank, ranks, True, False, chunk,
        kept // page, kept, groups,
        f"{ranks} {'rank' if ranks == 1 else 'ranks'} x ({' + '.join(parts)}), layout {layout}",
        "mem_cache/pool_host/base.py, mamba.py", note=note,
    )  # fmt: skip
    return (host, _files(chunk, groups)) if flags.hicache_storage_backend else (host,)


def _check(hosted: HostInputs, slot: int) -> None:
    flags = hosted.chosen.flags
    if flags.hicache_ratio is not None and flags.hicache_size is not None:
        raise DeploymentError(
            f"{flags.hicache_size} GB per rank overrides --hicache-ratio {flags.hicache_ratio:g}; "
            "give one of them",
            field="--hicache-size",
        )
    if flags.hicache_ratio is not None and not 0 < flags.hicache_ratio < float("inf"):
        raise DeploymentError(
            f"{flags.hicache_ratio} is not a positive number", field="--hicache-ratio", hint="for example 2"
        )
    ratio = _RATIO if flags.hicache_ratio is None else flags.hicache_ratio
    if hosted.chosen.version < _ONE_COPY and flags.hicache_size is None and ratio <= 1:
        raise DeploymentError(
            f"{ratio:g} makes no host pool larger than the device's pool, so SGLang {flags.engine_version} "
            "does not start",
            field="--hicache-ratio", hint="more than 1",
        )  # fmt: skip
    if not flags.enable_prefix_caching:
        raise DeploymentError(
            "HiCache has no effect without prefix caching", field="--enable-hierarchical-cache",
            hint="leave out --no-enable-prefix-caching",
        )  # fmt: skip
    if slot and flags.speculative_model:
        raise UnsupportedArchitecture(
            "the planner does not know HiCache's pools for recurrent states beside a draft model",
            field="layer_types",
            hint="leave out --enable-hierarchical-cache or the draft model",
        )
    if slot and hosted.chosen.version < _ONE_COPY:
        raise UnsupportedArchitecture(
            "the planner knows HiCache's pools for recurrent states from SGLang 0.5.23 on", field="layer_types",
            hint="--engine-version 0.5.23",
        )  # fmt: skip


def _files(chunk: int, groups: tuple[TierGroup, ...]) -> KVTier:
    """Return the disk KV tier of --hicache-storage-backend file (HiCacheFile), unlimited by default."""
    return KVTier(
        "HiCacheFile", "disk", None, None, 0, None, None, 1, False, False, chunk, None, None, groups,
        f"files of {chunk:,} bytes for each page", "mem_cache/hicache_storage.py",
        note="without SGLANG_HICACHE_FILE_BACKEND_MAX_SIZE (0.5.23), SGLang removes no file of this tier",
    )  # fmt: skip
