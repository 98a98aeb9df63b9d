"""Two tenants with the same prompt: one's blocks on disk are no hit for the other, and no lookup is slower."""

from __future__ import annotations

import itertools
import random
import time
from pathlib import Path
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key
from vllm.v1.request import Request
from vllm_steps import hasher
from vllm_tiers import manager, offload_keys

# With 12 blocks, the control shows in 996 of 1,000 pairs beside three busy processes (919 with 6 blocks).
BLOCK, BLOCKS, PAIRS = 16, 12, 1_000
# Standard deviation of the number of heads in 1,000 fair throws; four of them are exceeded once in 16,000 runs.
DEVIATION = 0.5 * PAIRS**0.5
_numbers = itertools.count()


def keys_of(tokens: list[int], salt: str) -> list[Any]:
    """Return vLLM's keys of a prompt's blocks."""
    sampling = SamplingParams(max_tokens=1)
    request = Request(
        f"keys-{next(_numbers)}", tokens, sampling, None, cache_salt=salt, block_hasher=hasher(BLOCK)
    )
    return [make_offload_key(each, 0) for each in request.block_hashes]


def seconds(made: Any, keys: list[Any]) -> tuple[float, int]:
    """Return how long the manager took to look a prompt up, and the number of blocks found."""
    context = ReqContext(f"look-{next(_numbers)}")
    made.on_new_request(context)
    since, found = time.perf_counter(), 0
    for each in keys:
        if made.lookup(each, context) is LookupResult.MISS:
            break
        found += 1
    took = time.perf_counter() - since
    made.on_request_finished(context)
    return took, found


def slower(made: Any, asker: str, chance: random.Random) -> tuple[int, int]:
    """Return in how many pairs a prompt known to the first tenant took longer than a new one, and its hits."""
    count = hits = 0
    for _ in range(PAIRS):
        known, unknown = ([chance.randrange(40_000) for _ in range(BLOCK * BLOCKS)] for _ in range(2))
        offload_keys(made, keys_of(known, "first"))
        prompts = {"known": keys_of(known, asker), "unknown": keys_of(unknown, asker)}
        took = {}
        for name in chance.sample(sorted(prompts), 2):
            took[name], found = seconds(made, prompts[name])
            hits += found
        count += took["known"] > took["unknown"]
    return count, hits


def test_disk_lookup_of_another_tenants_prompt_misses_in_the_same_time_as_an_unknown_one(
    tmp_path: Path,
) -> None:
    with manager(tmp_path, chunks=16) as made:
        count, hits = slower(made, "second", random.Random(0))
        assert hits == 0
        assert abs(count - PAIRS / 2) < 4 * DEVIATION
        count, hits = slower(made, "first", random.Random(1))  # the control: own blocks are found, and it shows
        assert hits == PAIRS * BLOCKS
        assert count - PAIRS / 2 > 4 * DEVIATION
