"""What requests ask for and tenants use: the mix headroom is told in, and counts of bounded cardinality."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

# Prometheus keeps every series it ever saw, so names that callers choose must not become labels without end.
MAX_TENANTS = 64
OTHER_TENANTS = "other"
NO_TENANT = "none"

# Weight of the newest request in the running mean: half of the mean is from the last 44 requests
# (0.5 = (1 - 1/64)^44).
_NEWEST = 1 / 64


@dataclass(slots=True)
class RequestMix:
    """Running means over the requests that were asked for; zeros before the first one."""

    prompt_tokens: float = 0.0
    max_tokens: float = 0.0
    sequences: float = 0.0
    requests: int = 0

    def observe(self, prompt_tokens: int, max_tokens: int, sequences: int) -> None:
        self.requests += 1
        weight = max(_NEWEST, 1 / self.requests)  # a plain mean until there are enough
        self.prompt_tokens += weight * (prompt_tokens - self.prompt_tokens)
        self.max_tokens += weight * (max_tokens - self.max_tokens)
        self.sequences += weight * (sequences - self.sequences)


@dataclass(slots=True)
class TenantUsage:
    """Counts of one tenant. ``promised_blocks``: the most KV blocks its unfinished requests may hold."""

    received: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    generation_tokens: int = 0
    promised_blocks: int = 0


class Tenants:
    """TenantUsage by name: the first MAX_TENANTS names each have their own, all others share one."""

    def __init__(self) -> None:
        self._known: dict[str, TenantUsage] = {}

    def usage(self, name: str) -> TenantUsage:
        label = name or NO_TENANT
        known = self._known.get(label)
        if known is None:
            if len(self._known) >= MAX_TENANTS:
                label = OTHER_TENANTS
            known = self._known.setdefault(label, TenantUsage())
        return known

    def items(self) -> list[tuple[str, TenantUsage]]:
        """(label, usage), in the order of their first requests."""
        return list(self._known.items())
