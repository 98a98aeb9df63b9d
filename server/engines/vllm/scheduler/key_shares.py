"""Division of sequences and KV blocks among API keys, in vLLM's scheduler (`tonnage.cache.admission.shares`).

A request's key is the entry `tonnage_key` of its `extra_args`. `tonnage serve` sets it. With a plain
`vllm serve`, a client sends it as `vllm_xargs: {"tonnage_key": "team-a"}`, and the server is started with
`--additional-config '{"tonnage": {"keys": 2}}'`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from tonnage.cache.admission import AdmissionRequest
from tonnage.cache.admission.shares import Shares, Uses, add_use
from tonnage.server.engines.vllm.params import KEY, PRIORITY, WEIGHT


def wish_of(request: Any) -> AdmissionRequest:
    """Return the API key, weight and priority of a vLLM request as an AdmissionRequest.

    A request that names no key has the key "" and the weight 1. The token counts are placeholders.
    """
    extra = getattr(request.sampling_params, "extra_args", None) or {}
    key, weight, priority = extra.get(KEY, ""), extra.get(WEIGHT, 1.0), extra.get(PRIORITY, 0)
    return AdmissionRequest(
        1, 1, tenant=key if isinstance(key, str) else "",
        priority=priority if isinstance(priority, int) else 0,
        weight=float(weight) if isinstance(weight, int | float) and weight > 0 else 1.0,
    )  # fmt: skip


class KeyShares:
    """The sequences and KV blocks that each API key holds, including the requests that start in this step.

    Args:
        shares: the rule that divides the engine's sequences and KV blocks among API keys.
        running: the running requests.
        blocks: function that returns the blocks reserved for a request.
    """

    def __init__(self, shares: Shares, running: Iterable[Any], blocks: Callable[[Any], int]) -> None:
        self._shares, self._blocks = shares, blocks
        self._uses: Uses = {}
        for request in running:
            self.take(request)

    def take(self, request: Any) -> None:
        """Add a running or starting request to the sequences and KV blocks that its API key holds."""
        uses, wish, blocks = self._about(request)
        add_use(uses, wish, 1, blocks)

    def ordered(self, waiting: Iterable[Any]) -> list[Any]:
        """Return the waiting requests in the order that divides the engine fairly among API keys."""
        return sorted(waiting, key=lambda request: self._shares.rank(*self._about(request)))

    def within(self, request: Any) -> bool:
        """Return whether the request's API key stays within its share of KV blocks if the request starts."""
        return self._shares.within(*self._about(request))

    def kept(self, request: Any) -> tuple[int, int]:
        """Return how many sequences and KV blocks must stay free for other API keys if the request starts."""
        return self._shares.kept(*self._about(request))

    def may_start(self, waiting: Iterable[Any], room: int) -> list[Any]:
        """Return the waiting requests that vLLM may see in this step; vLLM itself checks for free blocks.

        Requests of keys above their share are seen only if no other request may start.

        Args:
            waiting: the waiting requests in order.
            room: number of requests that the batch still has room for.
        """
        found: list[Any] = []
        any_within = False
        for request in self.ordered(waiting):
            within = self.within(request)
            if len(found) + self.kept(request)[0] >= room or (any_within and not within):
                break
            any_within |= within
            found.append(request)
            self.take(request)
        return found

    def _about(self, request: Any) -> tuple[Uses, AdmissionRequest, int]:
        """Return the arguments that methods of `Shares` take for a vLLM request.

        Returns:
            (sequences and KV blocks that each API key holds, the request as an AdmissionRequest, number of KV
            blocks reserved for the request).
        """
        return self._uses, wish_of(request), self._blocks(request)


def shortest_first(starting: list[Any], running: Iterable[Any]) -> tuple[list[Any], list[Any]]:
    """Return the requests that start and the running ones to skip, so that only one API key computes prompts.

    vLLM computes prompts in the order in which they started, and a long one uses the whole budget of a step.
    This function is called in every second step. In such a step, prompts are computed only for the key with the
    fewest prompt tokens left. So a long prompt of one key delays a short one of another key by one step.

    Args:
        starting: the waiting requests that may start in this step.
        running: the running requests.
    """
    prompts = [request for request in running if request.num_computed_tokens < request.num_prompt_tokens]
    left: dict[str, int] = {}
    for request in (*prompts, *starting):
        key = wish_of(request).tenant
        left[key] = left.get(key, 0) + request.num_tokens - request.num_computed_tokens
    if len(left) < 2:
        return starting, []
    first = min(left, key=left.__getitem__)
    return (
        [request for request in starting if wish_of(request).tenant == first],
        [request for request in prompts if wish_of(request).tenant != first],
    )
