"""Tenants: who a request belongs to, and what this caller may use of the server at once."""

from __future__ import annotations

import time
from dataclasses import dataclass

from tonnage.server.errors import ApiError, ErrorCode


@dataclass(frozen=True, slots=True)
class Tenant:
    """``priority``: of its requests that name none, lower runs first. ``cache_salt``: keeps its prefixes
    apart from those of others. ``max_num_seqs`` and ``tokens_per_minute`` (prompt plus completion): None, no
    limit."""

    name: str = ""
    priority: int = 0
    cache_salt: str = ""
    max_num_seqs: int | None = None
    tokens_per_minute: int | None = None


ANYBODY = Tenant()


@dataclass(slots=True)
class _Account:
    sequences: int = 0
    tokens: float = 0.0  # left in the bucket; filled at tokens_per_minute / 60 a second
    filled: float = 0.0


class Quotas:
    """What each tenant has in flight. One event loop, no locks."""

    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}

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
        """Give back what :meth:`enter` took; tokens only as far as they were not used."""
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
