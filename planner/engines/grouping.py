"""vLLM's KV cache groups: sets of layers that share a block table, and the bytes of one block.

The rules are from vllm/v1/core/kv_cache_utils.py and kv_cache_interface.py, 0.32.0 (get_kv_cache_groups,
unify_kv_cache_spec_page_size, _get_kv_cache_groups_uniform_page_size). tests/planner/test_vllm_groups.py
compares this module with these functions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tonnage.planner.errors import UnsupportedArchitecture
from tonnage.planner.model.layout import GroupKind
from tonnage.planner.units import ceil_div

# If the most frequent kind of layer has fewer than 1.5 times the layers of the rarest, each kind forms one
# group. Otherwise each kind is split into groups as large as the rarest kind
# (_get_kv_cache_groups_uniform_page_size).
PADDING_LIMIT = 1.5


@dataclass(frozen=True, slots=True)
class LayerPages:
    """The KV cache of one layer, as vLLM's KVCacheSpec describes it.

    Layers share a group only if everything except ``layer`` is equal.

    Attributes:
        layer: Index of the layer.
        kind: Kind of the cache, such as full, sliding or state.
        block_size: Tokens per block.
        page_bytes: Bytes of ``block_size`` tokens (or of one recurrent state) in this layer, padding included.
        shape: KV heads, head sizes and shapes of recurrent states.
        window: Tokens of a sliding window or of an attention chunk; None without one.
        fixed: Blocks per sequence if independent of its length, else None.
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
        """Return the values that must be equal for two layers to share a KV cache group."""
        return self.kind, self.block_size, self.page_bytes, self.shape, self.window, self.fixed


Groups = tuple[tuple[LayerPages, ...], ...]


def group_pages(pages: list[LayerPages], *, pads: bool = True) -> Groups:
    """Return the KV cache groups of the layers ``pages``, in vLLM's order.

    ``pads`` is whether vLLM pads attention pages that do not divide the largest page (from 0.24 on).

    Raises:
        UnsupportedArchitecture: vLLM itself cannot bring the pages to one size.
    """
    if len({page.key for page in pages}) <= 1 or _uniform_type(pages):
        return (tuple(pages),) if pages else ()
    return _equal_groups(_unify(pages, pads))


def _uniform_type(pages: list[LayerPages]) -> bool:
    """Return whether all layers cache the same tokens, such as all tokens or the same sliding window.

    Such layers form one group even if their bytes per token differ.
    """
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
    """Return the layers' KV cache pages, each enlarged to the bytes of the largest page.

    A page whose bytes divide those of the largest page gets more tokens per block. Any other page is padded.
    """
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
                f"vLLM has no KV cache layout for MLA layers with pages of {page.page_bytes:,} bytes beside "
                f"layers with pages of {largest:,} bytes",
                field="kv_lora_rank",
            )
        elif page.kind != "state" and not pads:
            raise UnsupportedArchitecture(
                f"KV cache pages of {page.page_bytes:,} bytes do not divide those of {largest:,} bytes, and "
                "this version of vLLM cannot pad them",
                field="layer_types",
                hint="--engine-version 0.24.0 or newer",
            )
        else:
            out.append(replace(page, page_bytes=largest))
    return out


def _equal_groups(pages: list[LayerPages]) -> Groups:
    """Split the layers' KV cache pages into groups of (nearly) equal size, each of one kind of layer.

    If the most frequent kind of layer has fewer than PADDING_LIMIT times the layers of the rarest kind, a group
    has as many layers as the most frequent kind. Otherwise a group has as many layers as the rarest kind. If
    the layers of a kind form n groups, layer i of this kind is in group i mod n.
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
    """Return the bytes of one KV cache block: the largest sum of page bytes of any KV cache group."""
    return max(sum(page.page_bytes for page in group) for group in groups)


def bucket_pages(pages: list[LayerPages]) -> list[list[LayerPages]]:
    """Divide KV cache pages into buckets of layers that keep the same tokens, in order of the first layer."""
    buckets: list[list[LayerPages]] = []
    for page in pages:
        home = next((bucket for bucket in buckets if _uniform_type([*bucket, page])), None)
        if home is None:
            buckets.append([page])
        else:
            home.append(page)
    return buckets


def pack_buckets(buckets: list[list[LayerPages]]) -> Groups:
    """Return the KV cache groups of vLLM's packed layout, which stores pages of different bytes side by side.

    The rule is vLLM's _get_packed_kv_cache_groups:

    - The layers of one bucket cache the same tokens.
    - A bucket can be split if it has the same number n of layers for each of its page sizes. Any other bucket
      becomes one group.
    - A group of a split bucket has at most m layers of each page size.
    - m is at least the largest n of the buckets with several page sizes. Of these values, m is the one for
      which rounding every bucket's n up to a multiple of m adds the fewest layers.
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
    """Return the number d, at least ``low``, that minimizes the padding of all ``values`` to multiples of d.

    If several numbers need the same padding, the largest is returned.
    """
    return min(range(low, max(values) + 1), key=lambda d: (sum(-v % d for v in values), -d))
