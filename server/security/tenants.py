"""Tenants: who a request belongs to, and what this caller may use of the server at once."""

from __future__ import annotations

import time
from dataclasses import dataclass

from tonnage.server.errors import ApiError, ErrorCode


@dataclass(frozen=True, slots=True)
class Tenant:
    """``priority``: of its requests that name none, and the lowest any of them may have; lower runs first.
    ``cache_salt``: keeps its prefixes apart from those of others; empty: they are shared. ``max_num_seqs`` and
    ``tokens_per_minute`` (prompt plus completion): None, no limit. ``metrics``: it may read the counts of all
    tenants."""

    name: str = ""
    priority: int = 0
    cache_salt: str = ""
    max_num_seqs: int | None = None
    tokens_per_minute: int | None = None
    metrics: bool = False

    def salt(self, asked: str) -> str:
        """The salt of its request that asks for ``asked`` (empty: none). Tenants never meet.

        A tenant's name is not empty and has no slash (keys.py), so what stands before the first slash says
        whose salt it is; of those who share nothing stands there, so they cannot spell the salt of another.
        """
        if self.cache_salt or (self.name and asked):
            return f"{self.cache_salt}/{asked}"
        return asked

    def priority_of(self, asked: int | None) -> int:
        """The priority of its request that asks for ``asked``.

        Raises ApiError for one that would pass others whom the operator has put beside or before this tenant:
        one step is worth seconds of waiting (`tonnage.cache.admission.types.AGEING_SECONDS`), -1000 hours.
        Without keys nobody stands before anybody, and requests order themselves.
        """
        if asked is None:
            return self.priority
        if self.name and asked < self.priority:
            raise ApiError(
                ErrorCode.INVALID_VALUE,
                f"priority is {asked}; this key's requests may have {self.priority} or more (lower runs first)",
                param="priority",
            )
        return asked


ANYBODY = Tenant()


@dataclass(slots=True)
class _Account:
    sequences: int = 0
    tokens: float = 0.0  # left in the bucket; filled at tokens_per_minute / 60 a second
    filled: float = 0.0


class Quotas:
    """What each tenant has in flight. One event loop, no locks. ``tenants``: how many keys the server has."""

    def __init__(self, tenants: int = 0) -> None:
        self.tenants = tenants
        self._accounts: dict[str, _Account] = {}

    def check_share(
        self, tenant: Tenant, sequences: int, queued: int, queue: int, drain_seconds: float
    ) -> None:
        """Whether a tenant without a limit of its own may have ``sequences`` more of the server's ``queue``, of
        which all together have ``queued``.

        It may have as many as it leaves free: one alone gets half, two a third each, and there is always room
        for the next (dynamic thresholds with alpha 1: Choudhury and Hahne, "Dynamic Queue Length Thresholds for
        Shared-Memory Packet Switches", IEEE/ACM Transactions on Networking 6(2), 1998). Its first sequence only
        needs a free place. Raises ApiError, 429 for now or for good.
        """
        if self.tenants < 2 or tenant.max_num_seqs is not None:
            return
        most = max(1, queue // 2)
        if sequences > most:
            raise _never(
                f"{sequences} sequences at once; a key may have {most} of the server's queue of {queue}"
            )
        held, free = self._account(tenant).sequences, queue - queued - sequences
        if held + sequences > max(1, free):
            raise ApiError(
                ErrorCode.RATE_LIMIT_EXCEEDED,
                f"this key has {held} sequences in the queue, {queue - queued} of whose {queue} places "
                "are free: a key may have as many as it leaves free (max_num_seqs: a limit of its own)",
                retry_after_seconds=drain_seconds,
            )

    def enter(self, tenant: Tenant, sequences: int, tokens: int, drain_seconds: float) -> None:
        """Take ``sequences`` and ``tokens`` (at most) of the quota.

        Raises ApiError, and takes nothing: 429 with Retry-After, or for good when the quota is smaller than
        the request.
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
                raise _never(f"{tokens} tokens; this key may use {rate} a minute")
            if tokens > account.tokens:
                raise ApiError(
                    ErrorCode.RATE_LIMIT_EXCEEDED,
                    f"this key has {int(account.tokens)} of {rate} tokens a minute left; "
                    f"the request may use {tokens}",
                    retry_after_seconds=(tokens - account.tokens) * 60 / rate,
                )
            account.tokens -= tokens
        account.sequences += sequences

    def leave(self, tenant: Tenant, sequences: int, unused_tokens: int) -> None:
        """Give back what ``enter`` took; tokens only as far as they were not used."""
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
