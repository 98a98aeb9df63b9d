"""Tenants, which are the owners of requests, and the quotas of the server's capacity that each may use."""

from __future__ import annotations

import time
from dataclasses import dataclass

from tonnage.server.errors import ApiError, ErrorCode, invalid_value


@dataclass(frozen=True, slots=True)
class Tenant:
    """An owner of requests, such as a team or an application, identified by an API key.

    Attributes:
        name: Name of the tenant in the key file; empty on a server without keys.
        priority: Default priority of the tenant's requests, and the best priority that they may request. Lower
            values run first.
        weight: Weight of the tenant, relative to other tenants whose requests wait. The engine's sequences and
            KV blocks are divided among these tenants in proportion to their weights.
        cache_salt: Salt that separates the tenant's cached prefixes from other tenants'; empty to share
            prefixes.
        max_num_seqs: Limit of the tenant's sequences in flight; None for no limit.
        tokens_per_minute: Limit of the tenant's prompt and completion tokens per minute; None for no limit.
        metrics: Whether the key may read the metrics of all tenants.
    """

    name: str = ""
    priority: int = 0
    weight: float = 1.0
    cache_salt: str = ""
    max_num_seqs: int | None = None
    tokens_per_minute: int | None = None
    metrics: bool = False

    def salt(self, requested: str) -> str:
        """Return the prefix cache salt of a request, which also separates this tenant from others.

        ``requested`` is the request's own salt. A tenant's name is not empty and has no slash (keys.py), so the
        part before the first slash identifies the tenant. For a tenant that shares its prefixes this part is
        empty, so its requests cannot produce another tenant's salt.
        """
        if self.cache_salt or (self.name and requested):
            return f"{self.cache_salt}/{requested}"
        return requested

    def priority_of(self, requested: int | None) -> int:
        """Return the priority of a request: ``requested``, or the tenant's default if it is None.

        A priority better than the tenant's own would let its requests overtake those of tenants that the
        operator ranked higher. One step of priority outweighs some seconds of waiting
        (`tonnage.cache.admission.types.AGEING_SECONDS`), so a priority of -1000 outweighs hours. Without keys
        there are no tenants to rank, so a request may have any priority.

        Raises:
            ApiError: The priority is better than the tenant's own.
        """
        if requested is None:
            return self.priority
        if self.name and requested < self.priority:
            raise invalid_value(
                f"priority is {requested}; this key's requests may have {self.priority} or more "
                "(lower runs first)",
                "priority",
            )
        return requested


ANONYMOUS = Tenant()


@dataclass(slots=True)
class _Account:
    sequences: int = 0
    tokens: float = 0.0  # tokens that the tenant may still use; tokens_per_minute / 60 are added per second
    filled: float = 0.0


class Quotas:
    """The quota that each tenant has used; ``tenants`` is the number of keys.

    All methods run on one event loop, so there are no locks.
    """

    def __init__(self, tenants: int = 0) -> None:
        self.tenants = tenants
        self._accounts: dict[str, _Account] = {}

    def check_share(
        self, tenant: Tenant, sequences: int, queued: int, queue: int, drain_seconds: float
    ) -> None:
        """Check that a request leaves other tenants a fair share of the queue.

        A tenant without a limit of its own may hold at most as many places in the queue as remain free. A
        single active tenant gets half of the queue, two tenants get a third each, and so on, so the next tenant
        always finds a free place. The rule is dynamic thresholds with alpha 1 (Choudhury and Hahne, "Dynamic
        Queue Length Thresholds for Shared-Memory Packet Switches", IEEE/ACM Transactions on Networking 6(2),
        1998). A tenant's first sequence is always accepted while a place is free.

        Args:
            tenant: The tenant that sends the request.
            sequences: Number of sequences of the new request.
            queued: Number of sequences of all tenants in the queue.
            queue: Number of places in the queue.
            drain_seconds: Estimated seconds until a place is free, for Retry-After.

        Raises:
            ApiError: The request exceeds the tenant's fair share of the queue (status 429). The error has no
                Retry-After if the request would exceed the tenant's share even when the queue is empty.
        """
        if self.tenants < 2 or tenant.max_num_seqs is not None:
            return
        most = max(1, queue // 2)
        if sequences > most:
            raise ApiError(
                ErrorCode.INSUFFICIENT_QUOTA,
                f"the request needs {sequences} sequences at once; a key may have {most} of the queue's "
                f"{queue} places: send fewer prompts or a smaller n",
            )
        held, free = self._account(tenant).sequences, queue - queued - sequences
        if held + sequences > max(1, free):
            raise ApiError(
                ErrorCode.RATE_LIMIT_EXCEEDED,
                f"this key has {held} sequences in the queue, and {queue - queued} of the queue's {queue} "
                "places are free: a key may hold at most as many as it leaves free, unless it has max_num_seqs",
                retry_after_seconds=drain_seconds,
            )

    def enter(self, tenant: Tenant, sequences: int, tokens: int, drain_seconds: float) -> None:
        """Charge a request's ``sequences`` and ``tokens``, an upper bound of its tokens, to the tenant's quota.

        Raises:
            ApiError: The request exceeds what is left of the quota (status 429), and nothing is charged. The
                error has no Retry-After if the request exceeds even the whole quota. ``drain_seconds`` is the
                Retry-After of a request that must wait until the tenant's other sequences have ended.
        """
        account = self._account(tenant)
        limit = tenant.max_num_seqs
        if limit is not None:
            if sequences > limit:
                raise ApiError(
                    ErrorCode.INSUFFICIENT_QUOTA,
                    f"the request needs {sequences} sequences at once; this key may run {limit}: send fewer "
                    "prompts or a lower n",
                )
            if account.sequences + sequences > limit:
                raise ApiError(
                    ErrorCode.RATE_LIMIT_EXCEEDED,
                    f"this key has {account.sequences} of its {limit} sequences in flight; wait until some end",
                    retry_after_seconds=drain_seconds,
                )
        rate = tenant.tokens_per_minute
        if rate is not None:
            if tokens > rate:
                raise ApiError(
                    ErrorCode.INSUFFICIENT_QUOTA,
                    f"the request needs {tokens} tokens; this key may use {rate} per minute: shorten the "
                    "prompt, or lower max_tokens",
                )
            if tokens > account.tokens:
                raise ApiError(
                    ErrorCode.RATE_LIMIT_EXCEEDED,
                    f"this key has {int(account.tokens)} of {rate} tokens per minute left; "
                    f"the request may use {tokens}",
                    retry_after_seconds=(tokens - account.tokens) * 60 / rate,
                )
            account.tokens -= tokens
        account.sequences += sequences

    def leave(self, tenant: Tenant, sequences: int, unused_tokens: int) -> None:
        """Return the sequences and the unused tokens of an ended request to the tenant's quota."""
        account = self._account(tenant)
        account.sequences -= sequences
        if tenant.tokens_per_minute is not None:
            account.tokens = min(float(tenant.tokens_per_minute), account.tokens + unused_tokens)

    def _account(self, tenant: Tenant) -> _Account:
        now = time.monotonic()
        account = self._accounts.get(tenant.name)
        if account is None:
            account = _Account(tokens=float(tenant.tokens_per_minute or 0), filled=now)
            self._accounts[tenant.name] = account
        elif tenant.tokens_per_minute is not None:
            earned = (now - account.filled) * tenant.tokens_per_minute / 60
            account.tokens = min(float(tenant.tokens_per_minute), account.tokens + earned)
        account.filled = now
        return account
