"""vLLM's KV cache groups: the layers that share a block table, and the bytes of a block.

The rules are from vllm/v1/core/kv_cache_utils.py and kv_cache_interface.py, 0.32.0 (get_kv_cache_groups,
unify_kv_cache_spec_page_size, _get_kv_cache_groups_uniform_page_size). tests/planner/test_vllm_groups.py
compares
them with these functions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tonnage.planner.errors import UnsupportedArchitecture
from tonnage.planner.model.layout import GroupKind
from tonnage.planner.units import ceil_div

# A kind with fewer than this many times the layers of the smallest kind stays one group; a larger kind is
# split into groups of the smallest kind's size (_get_kv_cache_groups_uniform_page_size).
PADDING_LIMIT = 1.5


@dataclass(frozen=True, slots=True)
class LayerPages:
    """The cache of one layer, as vLLM's KVCacheSpec describes it.

    Attributes:
        layer: Index of the layer.
        kind: Kind of its cache.
        block_size: Tokens per block.
        page_bytes: Bytes of ``block_size`` tokens (or of one state) in this layer, padding included.
        shape: Heads, head sizes and state shapes.
        window: Tokens of a sliding window or chunk.
        fixed: Blocks per sequence, where they do not depend on its length.

    Layers share a group only if everything except ``layer`` is equal.
    """

    layer: int
    kind: GroupKind
    block_size: int
    page_bytes: int
    shape: tuple[object, ...]
    window: int | None = None
    fixed: int | None = None

    @property
    def key(self) -> tuple[object, ...]:
        """Return the values that must be equal for two layers to share a group."""
        return self.kind, self.block_size, self.page_bytes, self.shape, self.window, self.fixed


Groups = tuple[tuple[LayerPages, ...], ...]


def group_pages(pages: list[LayerPages], *, pads: bool = True) -> Groups:
    """Return the KV cache groups in vLLM's order.

    ``pads`` is whether vLLM pads attention pages that do not divide the largest page (from 0.24 on).

    Raises:
        UnsupportedArchitecture: vLLM cannot unify the page sizes either.
    """
    if len({page.key for page in pages}) <= 1 or _uniform_type(pages):
        return (tuple(pages),) if pages else ()
    return _equal_groups(_unify(pages, pads))


def _uniform_type(pages: list[LayerPages]) -> bool:
    """Return whether all layers need the same token slots; they form one group even if their bytes differ."""
    first = pages[0]
    if any(page.block_size != first.block_size for page in pages):
        return False
    if first.kind in ("full", "mla"):
        return all(page.kind in ("full", "mla") for page in pages)
    same = all(page.kind == first.kind and page.window == first.window for page in pages)
    if first.kind == "state":
        return same and all((p.page_bytes, p.fixed) == (first.page_bytes, first.fixed) for p in pages)
    return same and first.kind in ("sliding", "chunked", "cross")


def _unify(pages: list[LayerPages], pads: bool) -> list[LayerPages]:
    """Bring all pages to the bytes of the largest: longer blocks where it is a multiple, else padding."""
    largest = max(page.page_bytes for page in pages)
    out = []
    for page in pages:
        if page.page_bytes == largest:
            out.append(page)
        elif page.kind != "state" and largest % page.page_bytes == 0:
            ratio = largest // page.page_bytes
            out.append(replace(page, block_size=page.block_size * ratio, page_bytes=largest))
        elif page.kind == "mla":
            raise UnsupportedArchitecture(
                f"MLA pages of {page.page_bytes:,} bytes beside pages of {largest:,} bytes: "
                "vLLM cannot unify them",
                field="kv_lora_rank",
            )
        elif page.kind != "state" and not pads:
            raise UnsupportedArchitecture(
                f"pages of {page.page_bytes:,} bytes do not divide those of {largest:,} bytes: this version of "
                "vLLM cannot unify them",
                field="layer_types",
                hint="--engine-version 0.24.0 or newer",
            )
        else:
            out.append(replace(page, page_bytes=largest))
    return out


def _equal_groups(pages: list[LayerPages]) -> Groups:
    """Split the pages into groups of (nearly) equal size, each of one kind.

    A group has the layer count of the smallest kind, or of the largest kind if that is less than PADDING_LIMIT
    times
    as many. Layer i of a kind goes to group i mod (groups of the kind).
    """
    kinds: dict[tuple[object, ...], list[LayerPages]] = {}
    for page in pages:
        kinds.setdefault(page.key, []).append(page)
    counts = [len(members) for members in kinds.values()]
    size = max(counts) if max(counts) < min(counts) * PADDING_LIMIT else min(counts)
    groups = []
    for members in kinds.values():
        number = ceil_div(len(members), size)
        groups += [tuple(members[i::number]) for i in range(number)]
    return tuple(groups)


def block_bytes(groups: Groups) -> int:
    """Return the bytes of one block: the sum of the pages of the widest group."""
    return max(sum(page.page_bytes for page in group) for group in groups)


def bucket_pages(pages: list[LayerPages]) -> list[list[LayerPages]]:
    """Collect pages that need the same token slots, in the order of their first layer."""
    buckets: list[list[LayerPages]] = []
    for page in pages:
        home = next((bucket for bucket in buckets if _uniform_type([*bucket, page])), None)
        if home is None:
            buckets.append([page])
        else:
            home.append(page)
    return buckets


def pack_buckets(buckets: list[list[LayerPages]]) -> Groups:
    """Return the groups of a block-outermost layout, with pages of different bytes side by side in a block.

    The rule is vLLM's _get_packed_kv_cache_groups. A bucket with equally many layers of each page size is split
    into
    groups with about the same number of layers per size. That number is at least the count of the largest
    bucket that
    has several sizes. All other buckets stay whole.
    """
    by_size = [_sizes(bucket) for bucket in buckets]
    repeats = [len(next(iter(sizes.values()))) if _balanced(sizes) else 0 for sizes in by_size]
    least = max(n for n, sizes in zip(repeats, by_size, strict=True) if len(sizes) > 1)
    each = _least_padding([n for n in repeats if n], least)
    groups: list[tuple[LayerPages, ...]] = []
    for bucket, sizes, number in zip(buckets, by_size, repeats, strict=True):
        count = ceil_div(number, each)
        if count <= 1:
            groups.append(tuple(bucket))
            continue
        pattern = list(zip(*sizes.values(), strict=True))
        groups += [tuple(page for row in pattern[i::count] for page in row) for i in range(count)]
    return tuple(groups)


def _sizes(bucket: list[LayerPages]) -> dict[int, list[LayerPages]]:
    out: dict[int, list[LayerPages]] = {}
    for page in bucket:
        out.setdefault(page.page_bytes, []).append(page)
    return out


def _balanced(sizes: dict[int, list[LayerPages]]) -> bool:
    return len({len(own) for own in sizes.values()}) == 1


def _least_padding(values: list[int], low: int) -> int:
    """Return the divisor, at least ``low``, to whose multiples ``values`` round up with the least padding.

    The largest divisor wins a tie.
    """
    return min(range(low, max(values) + 1), key=lambda d: (sum(-v % d for v in values), -d))
