"""The average size of requests, which headroom is measured in, and the use of each tenant."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from tonnage.cache.admission import AdmissionRequest, Limits, reserved_blocks
from tonnage.server.requests.accounts import Accounts, Ticket

# Prometheus keeps every series that it has seen, so the number of tenant labels must be bounded.
MAX_TENANTS = 64
OTHER_TENANTS = "other"
NO_TENANT = "none"

# Weight of the newest request in the running mean. The last 44 requests make half of it: 0.5 = (1 - 1/64)^44.
_NEWEST = 1 / 64


@dataclass(slots=True)
class RequestMix:
    """Running means over the requests received; zeros before the first one.

    Attributes:
        requests: requests received.
        blocks: mean of the upper bound of the KV blocks of a request, as admission counts them.
        sequences: mean of the sequences of a request.
    """

    requests: int = 0
    blocks: float = 0.0
    sequences: float = 0.0

    def observe(self, blocks: int, sequences: int) -> None:
        """Add a request that needs at most `blocks` blocks for its `sequences` sequences."""
        self.requests += 1
        weight = max(_NEWEST, 1 / self.requests)  # a plain mean until there are enough
        self.blocks += weight * (blocks - self.blocks)
        self.sequences += weight * (sequences - self.sequences)


@dataclass(slots=True)
class TenantUsage:
    """Counts of one tenant; `asked_blocks` is the upper bound of the KV blocks of its unfinished requests."""

    in_flight: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    generation_tokens: int = 0
    asked_blocks: int = 0


class Usage:
    """The request mix and the usage of each tenant of one app, updated by its accounts.

    The first MAX_TENANTS labels each have their own TenantUsage, and all others share one. A request that is
    rejected before it reaches the engine counts as an outcome only.
    """

    def __init__(self, accounts: Accounts, limits: Limits) -> None:
        self.mix = RequestMix()
        self.tenants: dict[str, TenantUsage] = {NO_TENANT: TenantUsage()}  # with zeros from the start
        self._limits = limits
        self._asked: dict[int, int] = {}  # id() of an unfinished ticket -> blocks
        accounts.on_submit.append(self._submitted)
        accounts.on_finish.append(self._finished)

    def tenant(self, name: str) -> TenantUsage:
        """Return the usage that requests of tenant `name` are counted in."""
        label = name or NO_TENANT
        known = self.tenants.get(label)
        if known is None:
            if len(self.tenants) >= MAX_TENANTS:
                label = OTHER_TENANTS
            known = self.tenants.setdefault(label, TenantUsage())
        return known

    def _submitted(self, ticket: Ticket) -> None:
        submission = ticket.submission
        assert submission is not None
        asked = 0
        for prompt in submission.prompts:
            request = AdmissionRequest(len(prompt), submission.params.max_tokens, submission.n)
            blocks = reserved_blocks(request, self._limits)
            self.mix.observe(blocks, submission.n)
            asked += blocks
        self._asked[id(ticket)] = asked
        usage = self.tenant(ticket.tenant.name)
        usage.in_flight += 1
        usage.asked_blocks += asked

    def _finished(self, ticket: Ticket) -> None:
        usage = self.tenant(ticket.tenant.name)
        assert ticket.outcome is not None
        usage.outcomes[ticket.outcome] += 1
        asked = self._asked.pop(id(ticket), None)
        if asked is None:  # rejected before it reached the engine
            return
        usage.in_flight -= 1
        usage.asked_blocks -= asked
        if ticket.counts is not None:
            usage.prompt_tokens += ticket.counts.prompt
            usage.generation_tokens += ticket.counts.completion
