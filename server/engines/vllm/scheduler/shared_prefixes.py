"""`--shared-system-prompt` inside vLLM: prompts share the blocks of configured prefixes whatever their salts.

vLLM puts a request's cache salt into the hash of its first block, and all later hashes depend on it. Here, if a
prompt begins with a shared prefix, the salt first enters the hash of the block after the prefix's whole blocks.
`tonnage.cache.prefix.index` does the same. Source: v1/core/kv_cache_utils.py (get_request_block_hasher) and
v1/request.py of vLLM 0.30 to 0.33.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

from tonnage.server.engines.sharing import whole_blocks
from tonnage.server.engines.vllm.arguments import BACKEND


class SharedPrefixes(Scheduler):
    """A mixin for vLLM's scheduler; requests with different cache salts share blocks of configured prefixes."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        asked: Any = self.vllm_config.additional_config
        self._prefixes: Sequence[Sequence[int]] = asked[BACKEND]["prefixes"]

    def add_request(self, request: Any) -> None:
        """Add a request as vLLM does, with its cache salt applied only after a shared prefix."""
        if request.cache_salt and request._block_hasher is not None:
            shared = whole_blocks(request.prompt_token_ids or (), self._prefixes, self.hash_block_size)
            if shared:
                salt_behind(request, shared)
        super().add_request(request)


def salt_behind(request: Any, shared: int) -> None:
    """Hash a request's first `shared` KV blocks without its cache salt, and all later blocks with it."""
    plain, salt = request._block_hasher, request.cache_salt.encode("utf-8", "surrogatepass")

    def hashes(request: Any) -> list[Any]:
        known = request.block_hashes
        if len(known) != shared:
            return list(plain(request))
        last = known[-1]
        # Each block's hash depends on its parent's hash, so a salt in this hash salts all later blocks.
        known[-1] = sha256(last + salt).digest()
        try:
            return list(plain(request))
        finally:
            known[-1] = last

    request.cache_salt = None
    request.block_hashes.clear()
    request.block_hashes.extend(plain(request)[:shared])
    request._block_hasher = hashes
    request.update_block_hashes()
