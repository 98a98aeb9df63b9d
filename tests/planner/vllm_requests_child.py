"""Add equal requests to vLLM's own KVCacheManager until it rejects one; one JSON line per folder.

Run as a program. Config, groups and block sizes are as in vllm_capacity_child.py, and the pool has the given
number of blocks. The steps follow vLLM's scheduler: prompt chunks of max_num_batched_tokens, cut by its own
_mamba_block_aligned_split, then one token per step. ``batches`` is the number of steps in flight (2 with
asynchronous scheduling), whose tokens the manager counts as not yet processed.
"""

import json
import os
import sys
from collections import deque
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))


def main(folders: list[str]) -> None:
    from vllm_capacity_child import configs

    for folder, config, found in configs(folders):
        out = {"error": found} if isinstance(found, str) else ask(folder, config, found)
        print("RESULT " + json.dumps({"folder": folder, **out}), flush=True)


def ask(folder: str, config, found) -> dict:
    questions = json.loads((Path(folder) / "questions.json").read_text())
    found = replace(found, num_blocks=questions["num_blocks"])
    config.cache_config.num_gpu_blocks = questions["num_blocks"]
    try:
        asked = [
            Pool(config, found, batches).counts(prompt, output)
            for batches in questions["batches"]
            for prompt, output in questions["requests"]
        ]
    except Exception as error:  # printed for the test, which fails on it
        return {"error": f"{type(error).__name__}: {error}"[:400]}
    groups = [[type(g.kv_cache_spec).__name__, g.kv_cache_spec.block_size] for g in found.kv_cache_groups]
    return {"groups": groups, "caching": config.cache_config.enable_prefix_caching, "counts": asked}


LONG = 30  # output tokens from which on requests run concurrently


class Pool:
    """vLLM's block manager, and its scheduler's function that cuts a prompt."""

    def __init__(self, config, found, batches: int) -> None:
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import (
            get_request_block_hasher,
            init_none_hash,
            resolve_kv_cache_block_sizes,
        )
        from vllm.v1.structured_output import StructuredOutputManager as Grammars

        init_none_hash(sha256)
        self.config, self.found, self.batches = config, found, batches
        self.block_size, self.hash_size = resolve_kv_cache_block_sizes(found, config)
        self.hasher = get_request_block_hasher(self.hash_size, sha256)
        self.grammars = Grammars(config)
        self.scheduler = self.new_scheduler()
        self.made = 0

    def new_scheduler(self):
        return self.config.scheduler_config.get_scheduler_cls()(
            vllm_config=self.config, kv_cache_config=self.found, structured_output_manager=self.grammars,
            block_size=self.block_size, hash_block_size=self.hash_size,
        )  # fmt: skip

    def counts(self, prompt: int, output: int) -> dict:
        """Return the number of requests held at several points of their lives.

        The points are: after the prompt, at the fullest decode step after that, and at the last token. The
        result also has the tokens that a second request of the same prompt finds, and the requests that the
        scheduler runs without a preemption if they arrive together.
        """
        self.manager = self.new_manager()
        usable = self.manager.block_pool.get_num_free_blocks()
        held: list[int] = []
        first = self.request(prompt, output)
        grown = self.grow(first, prompt, output - 1, lambda: held.append(usable - self.free()))
        hit = None
        if grown:
            self.manager.free(first)
            again = self.request(prompt, output, tokens=first.prompt_token_ids)
            hit = self.manager.get_computed_blocks(again)[1]
        # held[-output] is the last step of the prompt, which is processed `settled` steps later
        settled = min(self.batches, output - 1)
        decode = held[-output:][settled:]
        fullest = settled + decode.index(max(decode)) if grown else settled
        many = self.count(prompt, output, fullest)
        asked = many and output >= LONG and self.batches == 1  # the scheduler's own on a CPU
        return {
            "started": self.count(prompt, output, settled),
            "fullest": many,
            "last": self.count(prompt, output, output - 1),
            "hit": hit,
            "unpreempted": self.unpreempted(many, prompt, output) if asked else None,
        }

    def unpreempted(self, many: int, prompt: int, output: int) -> int:
        while many and self.preempted(many, prompt, output):
            many -= 1
        return many

    def preempted(self, many: int, prompt: int, output: int) -> int:
        from vllm.v1.outputs import ModelRunnerOutput

        scheduler = self.new_scheduler()
        scheduler.max_num_running_reqs = scheduler.max_num_active_reqs = many
        requests = [self.request(prompt, output) for _ in range(many)]
        for request in requests:
            scheduler.add_request(request)
        while scheduler.get_num_unfinished_requests():
            step = scheduler.schedule()
            ids = list(step.num_scheduled_tokens)
            assert ids, "no request can continue"
            whole = (
                scheduler.requests[id].num_computed_tokens >= scheduler.requests[id].num_tokens for id in ids
            )
            tokens = [[7] if done else [] for done in whole]
            at = {id: place for place, id in enumerate(ids)}
            scheduler.update_from_output(step, ModelRunnerOutput(ids, at, tokens))
        return sum(request.num_preemptions for request in requests)

    def new_manager(self):
        from vllm.v1.core.kv_cache_manager import KVCacheManager

        budget = self.config.scheduler_config.max_num_batched_tokens
        return KVCacheManager(
            kv_cache_config=self.found, max_model_len=self.config.model_config.max_model_len,
            scheduler_block_size=self.block_size, hash_block_size=self.hash_size,
            max_in_flight_tokens=budget * self.batches,
            enable_caching=self.config.cache_config.enable_prefix_caching,
        )  # fmt: skip

    def count(self, prompt: int, output: int, decodes: int) -> int:
        self.manager = self.new_manager()
        found = 0
        while self.grow(self.request(prompt, output), prompt, decodes):
            found += 1
        return found

    def free(self) -> int:
        return self.manager.block_pool.get_num_free_blocks()

    def request(self, prompt: int, output: int, tokens: list[int] | None = None):
        from vllm import SamplingParams
        from vllm.v1.request import Request

        self.made += 1
        # the first token alone tells requests apart: hashes are chained
        tokens = tokens or [self.made, *range(1, prompt)]
        return Request(
            f"r{self.made}", tokens, SamplingParams(max_tokens=output), None, block_hasher=self.hasher
        )  # fmt: skip

    def grow(self, request, prompt: int, decodes: int, after=lambda: None) -> bool:
        """Compute the prompt and ``decodes`` further tokens; return whether the manager had blocks for all."""
        scheduler, budget = self.scheduler, self.config.scheduler_config.max_num_batched_tokens
        steps: deque[int] = deque(maxlen=self.batches - 1)
        done = 0
        while done < prompt + decodes:
            self.manager.new_step_starts()
            new = min(budget, prompt - done) if done < prompt else 1
            if scheduler.need_mamba_block_aligned_split:
                request.num_computed_tokens = done
                new = scheduler._mamba_block_aligned_split(request, new)
            request.num_computed_tokens, request.num_in_flight_tokens = done, sum(steps)
            start = {}
            if not done:
                blocks, hit, _ = self.manager.get_computed_blocks(request)
                assert not hit
                start = {
                    "new_computed_blocks": blocks,
                    "full_sequence_must_fit": scheduler.scheduler_reserve_full_isl,
                }
            if self.manager.allocate_slots(request, new, **start) is None:
                return False
            _, kept = self.manager.take_kv_cache_block_copies()
            self.manager.block_pool.free_blocks(kept)
            done += new
            steps.append(new)
            if done >= prompt:
                request.append_output_token_ids(7)
                after()
        return True


if __name__ == "__main__":
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    main(sys.argv[1:])
