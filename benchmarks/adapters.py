"""Adapters that give block managers one interface, so that the same driver can time each of them.

    admit(request_id, tokens, max_tokens) -> hit tokens, or None if there is no space now
    append(request_ids, token_ids) -> request ids without a slot (preempted); [] where blocks are reserved
    free(request_id)

`admit` takes a whole prompt as a list of ints, finds its prefix hit, allocates all its blocks and publishes
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tonnage.cache.manager import Admitted, KVCacheManager
from tonnage.cache.sequences.tables import token_array
from tonnage.planner.model.layout import KVGroup, KVLayout

BLOCK_SIZE = 16
MAX_MODEL_LEN = 262_144


class Tonnage:
    """This project's KVCacheManager with one full group."""

    name = "tonnage"

    def __init__(self, blocks: int, running: int, **options: Any) -> None:
        layout = KVLayout(
            (KVGroup("full", (0,)),), BLOCK_SIZE, 1, kv_heads=8, head_size=128, dtype="bfloat16", dtype_bytes=2
        )
        self.manager = KVCacheManager(
            layout,
            blocks,
            max_num_seqs=running,
            max_model_len=MAX_MODEL_LEN,
            max_num_batched_tokens=MAX_MODEL_LEN,
            **{"hash_seed": 0, **options},
        )
        # The rejected request with its tokens as an array, as engines keep it until the next attempt.
        self._refused: tuple[Any, Any] | None = None

    def admit(self, request_id: Any, tokens: list[int], max_tokens: int) -> int | None:
        """Admit a prompt and return its hit tokens, or None if there is no space now."""
        again = self._refused is not None and self._refused[0] == request_id
        prompt = self._refused[1] if again else token_array(tokens)
        answer = self.manager.admit(request_id, prompt, max_tokens)
        if not isinstance(answer, Admitted):
            self._refused = (request_id, prompt)
            return None
        self._refused = None
        ids, ends = (request_id,), (len(tokens),)
        self.manager.extend(ids, ends)
        self.manager.commit(ids, ends)
        return answer.cached_tokens

    def append(self, request_ids: Sequence[Any], token_ids: list[int]) -> Sequence[Any]:
        """Append one token to each request; none is preempted, because blocks are reserved."""
        self.manager.decode(request_ids, token_ids)
        return ()

    def free(self, request_id: Any) -> None:
        """Free a request's blocks."""
        self.manager.free((request_id,))


class Vllm:
    """vLLM's KVCacheManager, driven as its Scheduler does (v1/core/sched/scheduler.py, 0.32), with SHA-256."""

    name = "vllm"

    def __init__(self, blocks: int, running: int) -> None:
        import torch
        from vllm.sampling_params import SamplingParams
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core.kv_cache_manager import KVCacheManager as VllmManager
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.request import Request

        self._request, self._sampling = Request, SamplingParams
        function = get_hash_fn_by_name("sha256")
        init_none_hash(function)
        self._hasher = get_request_block_hasher(BLOCK_SIZE, function)
        spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=8, head_size=128, dtype=torch.bfloat16)
        config = KVCacheConfig(
            num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
        )
        self.manager = VllmManager(
            config,
            max_model_len=MAX_MODEL_LEN,
            scheduler_block_size=BLOCK_SIZE,
            hash_block_size=BLOCK_SIZE,
            enable_caching=True,
            log_stats=False,
        )
        self._live: dict[Any, Any] = {}
        self._refused: tuple[Any, Any] | None = None  # the rejected request with its hashes, as in vLLM's queue

    def request(self, request_id: Any, tokens: list[int], max_tokens: int) -> Any:
        """Return vLLM's Request, which hashes the prompt."""
        return self._request(
            request_id=str(request_id),
            prompt_token_ids=tokens,
            sampling_params=self._sampling(max_tokens=max_tokens),
            pooling_params=None,
            block_hasher=self._hasher,
        )

    def admit(self, request_id: Any, tokens: list[int], max_tokens: int) -> int | None:
        """Admit a prompt and return its hit tokens, or None if there is no space now."""
        if self._refused is not None and self._refused[0] == request_id:
            request = self._refused[1]
        else:
            request = self.request(request_id, tokens, max_tokens)
        blocks, hit, _ = self.manager.get_computed_blocks(request)
        got = self.manager.allocate_slots(
            request,
            request.num_tokens - hit,
            hit,
            blocks,
            full_sequence_must_fit=True,
            has_scheduled_reqs=bool(self._live),
        )
        self._refused = (request_id, request) if got is None else None
        if got is None:
            return None
        request.num_computed_tokens = request.num_tokens
        self._live[request_id] = request
        return int(hit)

    def append(self, request_ids: Sequence[Any], token_ids: list[int]) -> list[Any]:
        """Append one token to each request and return the preempted requests."""
        lost: list[Any] = []
        allocate, live = self.manager.allocate_slots, self._live
        for request_id, token in zip(request_ids, token_ids, strict=True):
            request = live.get(request_id)
            if request is None:  # preempted earlier in this step
                continue
            request.append_output_token_ids(token)
            while allocate(request, 1) is None:
                youngest = next(reversed(live))
                self.manager.free(live.pop(youngest))
                lost.append(youngest)
                if youngest == request_id:
                    break
            else:
                request.num_computed_tokens += 1
        return lost

    def free(self, request_id: Any) -> None:
        """Free a request's blocks."""
        self.manager.free(self._live.pop(request_id))
