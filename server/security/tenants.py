"""Tenants: the owners of requests, with the share of the server that each may use."""

from __future__ import annotations

import time
from dataclasses import dataclass

from tonnage.server.errors import ApiError, ErrorCode


@dataclass(frozen=True, slots=True)
class Tenant:
    """An owner of requests, identified by an API key.

    Attributes:
        name: The key's name; empty without keys.
        priority: Default priority of its requests, and the best one that they may request. Lower runs first.
        cache_salt: Salt that separates its cached prefixes from other tenants'; empty to share them.
        max_num_seqs: Limit of its sequences in flight; None for no limit.
        tokens_per_minute: Limit of its prompt and completion tokens per minute; None for no limit.
        metrics: Whether it may read the counts of all tenants.
    """

    name: str = ""
    priority: int = 0
    cache_salt: str = ""
    max_num_seqs: int | None = None
    tokens_per_minute: int | None = None
    metrics: bool = False

    def salt(self, requested: str) -> str:
        """Return the salt of a request whose own salt is ``requested``; salts of two tenants never collide.

        A tenant's name is not empty and has no slash (keys.py), so the part before the first slash identifies
        the tenant. A tenant that shares its prefixes has an empty part there, so it cannot produce another's
        salt.
        """
        if self.cache_salt or (self.name and requested):
            return f"{self.cache_salt}/{requested}"
        return requested

    def priority_of(self, requested: int | None) -> int:
        """Return the priority of a request: ``requested``, or the tenant's own for None.

        A priority better than the tenant's own would overtake tenants that the operator has ranked before it:
        one step is worth seconds of waiting (`tonnage.cache.admission.types.AGEING_SECONDS`), -1000 is worth
        hours. Without keys no tenants are ranked, so a request may have any priority.

        Raises:
            ApiError: The priority is better than the tenant's own.
        """
        if requested is None:
            return self.priority
        if self.name and requested < self.priority:
            raise ApiError(
                ErrorCode.INVALID_VALUE,
                f"priority is {requested}; this key's requests may have {self.priority} or more "
                "(lower runs first)",
                param="priority",
            )
        return requested


ANONYMOUS = Tenant()


@dataclass(slots=True)
class _Account:
    sequences: int = 0
    tokens: float = 0.0  # tokens left, refilled at tokens_per_minute / 60 per second
    filled: float = 0.0


class Quotas:
    """Use of the quotas by each tenant, on one event loop without locks; ``tenants`` is the number of keys."""

    def __init__(self, tenants: int = 0) -> None:
        self.tenants = tenants
        self._accounts: dict[str, _Account] = {}

    def check_share(
        self, tenant: Tenant, sequences: int, queued: int, queue: int, drain_seconds: float
    ) -> None:
        """Check the fair share of a tenant without its own limit.

        It may hold as many of the queue's places as it leaves free: alone it gets half, two tenants get a third
        each, and a place is always left for the next (dynamic thresholds with alpha 1: Choudhury and Hahne,
        "Dynamic Queue Length Thresholds for Shared-Memory Packet Switches", IEEE/ACM Transactions on Networking
        6(2), 1998). A first sequence needs only a free place.

        Args:
            tenant: The tenant.
            sequences: The sequences of its new request.
            queued: Sequences of all tenants in the queue.
            queue: Places in the queue.
            drain_seconds: Estimated wait, for Retry-After.

        Raises:
            ApiError: 429, to retry later or never.
        """
        if self.tenants < 2 or tenant.max_num_seqs is not None:
            return
        most = max(1, queue // 2)
        if sequences > most:
            raise _never(f"{sequences} sequences at once; a key may have {most} of the queue's {queue} places")
        held, free = self._account(tenant).sequences, queue - queued - sequences
        if held + sequences > max(1, free):
            raise ApiError(
                ErrorCode.RATE_LIMIT_EXCEEDED,
                f"this key has {held} sequences in the queue, and {queue - queued} of its {queue} places are "
                "free: a key may hold as many as it leaves free; set max_num_seqs for a limit of its own",
                retry_after_seconds=drain_seconds,
            )

    def enter(self, tenant: Tenant, sequences: int, tokens: int, drain_seconds: float) -> None:
        """Charge ``sequences`` and at most ``tokens`` to the tenant's quota.

        Raises:
            ApiError: 429 and nothing is charged; without Retry-After when the request exceeds the whole quota.
        """
        account = self._account(tenant)
        limit = tenant.max_num_seqs
        if limit is not None:
            if sequences > limit:
                raise _never(f"{sequences} sequences at once; this key may run {limit}")
            if account.sequences + sequences > limit:
                raise ApiError(
                    ErrorCode.RATE_LIMIT_EXCEEDED,
                    f"this key has {account.sequences} of {limit} sequences in flight",
                    retry_after_seconds=drain_seconds,
                )
        rate = tenant.tokens_per_minute
        if rate is not None:
            if tokens > rate:
                raise _never(f"{tokens} tokens; this key may use {rate} per minute")
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
        """Return the sequences and the unused tokens of a request to the tenant's quota."""
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


def _never(message: str) -> ApiError:
    return ApiError(ErrorCode.INSUFFICIENT_QUOTA, f"the request needs {message}")
