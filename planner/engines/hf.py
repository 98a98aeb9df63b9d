"""This project's own hf engine: flag defaults and checks, supported caches, and the geometry of its KV pool.

Layers are grouped as in vLLM (``grouping``), so that plans for both engines are comparable.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from tonnage.planner.deployment import Deployment
from tonnage.planner.engines.base import Engine
from tonnage.planner.engines.grouping import LayerPages, group_pages
from tonnage.planner.engines.pool import Demand, PoolSpec
from tonnage.planner.engines.runtime import hf
from tonnage.planner.engines.runtime.estimate import Estimate
from tonnage.planner.engines.runtime.host import HostInputs
from tonnage.planner.engines.serve_line import changed, tonnage_serve
from tonnage.planner.errors import DeploymentError, UnsupportedArchitecture
from tonnage.planner.model.architecture import Architecture, CacheLayer
from tonnage.planner.model.dtypes import HF_KV_DTYPE_BYTES, KV_SCALE_BYTES
from tonnage.planner.model.host import HostMemory
from tonnage.planner.model.layout import KVGroup, KVLayout
from tonnage.planner.model.requests import GroupLaw, RequestLaw
from tonnage.planner.model.tier import KVTier, TierGroup, blocks_on_disk, disk_tier, index_bytes
from tonnage.planner.plans import Plan, Resolved
from tonnage.planner.units import GiB, ceil_div


class HF(Engine):
    """This project's engine, which runs transformers' modules on its own pool of KV cache blocks."""

    name = "hf"
    title = "the hf engine"
    distributions = ("transformers",)
    batch: ClassVar = {"cpu": (64, 512), "cuda": (64, 2048)}
    blocks: ClassVar = {"cpu": 16, "cuda": 16}
    kv_dtypes: ClassVar = HF_KV_DTYPE_BYTES
    divides = False
    fallback = "vllm"
    quantizes_to = ("int8", "nf4", "nf4-double")
    float32_kv_cache = True
    as_transformers = True
    null_block = True
    shows_version = False
    kernels: ClassVar = {
        "cpu": {
            "nf4": "bitsandbytes-cpu-avx512",
            "gptq": "gptqmodel-cpu-avx512",
            "awq": "gptqmodel-cpu-avx512",
        }
    }

    def block_size(self, asked: int | None, flags: Deployment, architecture: Architecture) -> int:
        """Return the tokens per KV cache block.

        Raises:
            DeploymentError: the requested size is not a power of two.
        """
        size = super().block_size(asked, flags, architecture)
        if size & (size - 1):
            raise DeploymentError(f"{size} is not a power of two", field="--block-size", hint="for example 16")
        return size

    def gpu_activation(self, architecture: Architecture, chosen: Resolved) -> Estimate | None:
        """Estimate the activations of one step of the hf engine on a GPU."""
        return hf.activation_bytes(architecture, chosen)

    def host_memory(self, hosted: HostInputs) -> HostMemory:
        """Return the host memory of the hf engine's API process and engine process on GPUs."""
        return hf.host_memory(hosted)

    def check_encoder(self, architecture: Architecture) -> None:
        """Raise UnsupportedArchitecture for a model that pools a decoder's outputs; accept all other encoders.

        transformers has no class for such a model.
        """
        if architecture.pooled:
            self.check_classifier(architecture)

    def decoder_pool(self, architecture: Architecture, chosen: Resolved) -> PoolSpec:
        """Return the hf engine's pool of KV cache blocks, for a model that generates tokens."""
        return build_pool(
            architecture, chosen.flags.kv_cache_dtype, chosen.block_size, chosen.max_num_batched_tokens
        )

    def free_blocks(self, chosen: Resolved, pool: PoolSpec, size: int, fixed: int, weights: int) -> int:
        """Return the number of KV cache blocks that fit into free memory, with an upper bound on a CPU.

        On a CPU the pool takes host memory that other programs need. It is therefore limited to the blocks of
        max_num_seqs sequences of full length, plus the null block.
        """
        blocks = super().free_blocks(chosen, pool, size, fixed, weights)
        if chosen.flags.device == "cpu":
            blocks = min(blocks, chosen.max_num_seqs * pool.sequence_blocks(chosen.max_model_len) + 1)
        return blocks

    def tier_bytes(self, chosen: Resolved, pool: PoolSpec) -> int:
        """Return the bytes of the KV tier in host memory: --kv-offloading-size, rounded down to whole blocks.

        Raises:
            DeploymentError: the tier cannot be used with the device, the model's layers or another flag.
        """
        flags, layout = chosen.flags, pool.layout
        size, field = flags.kv_offloading_bytes, "--kv-offloading-size"
        if not size:
            return 0
        if flags.device != "cpu":
            raise DeploymentError(
                "the hf engine has KV tiers only when it runs on a CPU",
                field=field,
                hint="--engine vllm on a GPU",
            )
        if not flags.enable_prefix_caching:
            raise DeploymentError(
                "a KV tier keeps cached prefixes, and prefix caching is off", field=field,
                hint="leave out --no-enable-prefix-caching",
            )  # fmt: skip
        if len(layout.groups) != 1 or layout.slides:
            raise DeploymentError(
                "the hf engine's KV tier needs layers that all attend to the whole context; this model has "
                + ("sliding windows" if layout.slides else f"{len(layout.groups)} groups of layers"),
                field=field,
            )
        block = layout.bytes_per_block
        if size < block:
            raise DeploymentError(
                f"{size:,} bytes hold no block of {block:,} bytes", field=field, hint=f"at least {block:,}"
            )
        return size // block * block

    def index_bytes(self, chosen: Resolved, pool: PoolSpec) -> int:
        """Return the bytes of the disk KV tier's in-memory index when --kv-offloading-disk is full."""
        flags = chosen.flags
        if flags.kv_offloading_disk is None:
            return 0
        _, size = disk_tier(flags.kv_offloading_disk, "--kv-offloading-disk")
        blocks = blocks_on_disk(size, pool.layout.bytes_per_block)
        return index_bytes(blocks, flags.kv_offloading_policy == "learned")

    def tiers(self, hosted: HostInputs) -> tuple[KVTier, ...]:
        """Return the KV offloading tiers: one in host memory, and behind it one on disk if configured."""
        flags, layout = hosted.chosen.flags, hosted.layout
        if not flags.kv_offloading_bytes:
            return ()
        block, tokens = layout.bytes_per_block, layout.block_size
        groups = (TierGroup("full", tokens, hosted.chosen.max_model_len // tokens),)
        blocks = flags.kv_offloading_bytes // block
        host = KVTier(
            "host", "host", flags.kv_offloading_bytes, blocks * block, blocks * block, blocks * block, None, 1,
            False, False, block, blocks, blocks * tokens, groups, f"{blocks:,} blocks of {block:,} bytes",
            "server/engines/hf/kv_tier.py", note="part of the plan's memory",
        )  # fmt: skip
        if flags.kv_offloading_disk is None:
            return (host,)
        _, size = disk_tier(flags.kv_offloading_disk, "--kv-offloading-disk")
        files = blocks_on_disk(size, block)
        if not files:
            raise DeploymentError(
                f"{size:,} bytes hold no block of {block:,} bytes with its file's header",
                field="--kv-offloading-disk", hint="give a larger size",
            )  # fmt: skip
        return host, KVTier(
            "disk", "disk", size, size, files * block, size, None, 1, False, False, block, files,
            files * tokens, groups, f"{files:,} files of {block:,} bytes with header, pages and directories",
            "cache/disk/folder.py",
        )  # fmt: skip

    def request_law(self, architecture: Architecture, chosen: Resolved, pool: PoolSpec) -> RequestLaw:
        """Return the rule for the number of KV cache blocks that a request reserves when it is admitted.

        A request reserves the blocks of its whole prompt and its maximum output. A group of sliding-window
        layers reserves at most the blocks that it can ever hold (cache/admission/reservation.py). In its
        default admission mode "guaranteed", the engine admits more requests than these reservations allow, and
        stalls some of them in some steps.
        """
        if not pool.demands:
            return super().request_law(architecture, chosen, pool)
        size = chosen.block_size
        groups = tuple(
            GroupLaw("all", size)
            if demand.most is None
            else GroupLaw("window", size, group.window or 1, cap=ceil_div(demand.most + size - 1, size))
            for group, demand in zip(pool.layout.groups, pool.demands, strict=True)
        )
        caching = chosen.flags.enable_prefix_caching and any(group.kind == "all" for group in groups)
        return RequestLaw(
            groups, pool.layout.bytes_per_block, chosen.max_num_batched_tokens, 1, size if caching else None,
            "reservations of the hf engine's admission", reserves=True,
        )  # fmt: skip

    def serve_lines(self, plan: Plan) -> tuple[str, ...]:
        """Return the ``tonnage serve`` command of ``plan``."""
        flags = plan.deployment
        more = ["--quantization", flags.quantization] if flags.quantization in self.quantizes_to else []
        if flags.kv_offloading_bytes:
            more += ["--kv-offloading-size", f"{flags.kv_offloading_bytes / GiB:.12g}"]
        more += changed(flags, ("kv_offloading_disk", "kv_offloading_policy"))
        return (tonnage_serve(plan, more),)


def build_pool(
    architecture: Architecture, dtype: str, block_size: int, max_num_batched_tokens: int
) -> PoolSpec:
    """Return the hf engine's pool of KV cache blocks.

    Raises:
        UnsupportedArchitecture: the engine cannot store a layer's cache, or layers differ in heads or head
            size.
    """
    layout = _layout(architecture, dtype, block_size)
    demands = []
    for group in layout.groups:
        if group.window is None:
            demands.append(Demand(block_size))
        else:
            # One extra block is needed because a window may begin inside a block.
            demands.append(Demand(block_size, most=group.window - 1 + max_num_batched_tokens, extra=1))
    return PoolSpec(layout, tuple(demands))


def _layout(architecture: Architecture, dtype: str, block_size: int) -> KVLayout:
    layers = architecture.cache_layers
    _only_attention(layers)
    page_bytes = None
    element, scale = HF_KV_DTYPE_BYTES[dtype], KV_SCALE_BYTES.get(dtype, 0)
    if any(layer.kind == "mla" for layer in layers):
        # transformers expands the MLA latent to K and V of every head before it calls the attention function.
        layers = tuple(
            replace(layer, kind="full", kv_heads=architecture.heads, head_size=architecture.head_size)
            for layer in layers
        )
        value = {layer.value_head_size for layer in layers}
        if len(value) != 1 or None in value:
            raise UnsupportedArchitecture(
                "the hf engine does not support MLA layers that differ in V head size", field="v_head_dim"
            )
        width = architecture.head_size + sum(v for v in value if v is not None)
        page_bytes = block_size * architecture.heads * (width * element + 2 * scale)
    shapes = {(_stored_heads(layer), layer.head_size) for layer in layers}
    if len(shapes) != 1:
        raise UnsupportedArchitecture(
            "the hf engine does not support layers that differ in (KV heads, head size): "
            + ", ".join(map(str, sorted(shapes))),
            field="num_key_value_heads",
            hint="plan it with --engine vllm",
        )
    ((heads, head_size),) = shapes
    if scale and page_bytes is None:
        page_bytes = 2 * block_size * heads * (head_size * element + scale)
    groups = _groups(layers, block_size)
    return KVLayout(
        groups=groups,
        block_size=block_size,
        layer_slots=max(len(group.layers) for group in groups),
        kv_heads=heads,
        head_size=head_size,
        dtype=dtype,
        dtype_bytes=element,
        page_bytes=page_bytes,
    )


def _stored_heads(layer: CacheLayer) -> int:
    """Return the number of KV heads that a layer caches; some models repeat K and V before caching them."""
    return layer.kv_heads if layer.transformers_kv_heads is None else layer.transformers_kv_heads


def _only_attention(layers: tuple[CacheLayer, ...]) -> None:
    """Raise UnsupportedArchitecture for a layer whose cache is not K and V of equal head size.

    The pool stores full and sliding-window layers, and MLA layers with latents expanded to K and V.
    """
    if not layers:
        raise UnsupportedArchitecture(
            "an encoder generates no tokens and has no KV cache, so there is no pool to size",
            field="architectures",
        )
    for layer in layers:
        narrow = layer.kind != "mla" and layer.value_head_size not in (None, layer.head_size)
        if layer.kind not in ("full", "sliding", "mla") or layer.compression > 1 or narrow:
            what = "V narrower than K" if narrow else layer.kind
            raise UnsupportedArchitecture(
                f"the hf engine's pool cannot store layer {layer.layer} ({what})", field="architectures",
                hint="plan it with --engine vllm",
            )  # fmt: skip


def _groups(layers: tuple[CacheLayer, ...], block_size: int) -> tuple[KVGroup, ...]:
    """Return the KV cache groups: layers of one attention kind and window size, with pages of equal bytes."""
    pages = [LayerPages(layer.layer, layer.kind, block_size, 1, (), layer.window) for layer in layers]
    return tuple(
        KVGroup(group[0].kind, tuple(page.layer for page in group), group[0].window)
        for group in group_pages(pages)
    )


ENGINE = HF()
