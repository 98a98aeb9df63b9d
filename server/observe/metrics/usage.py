"""The average size of requests, on which the reported headroom is based, and the usage of each tenant."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from tonnage.cache.admission import AdmissionRequest, Limits, reserved_blocks
from tonnage.server.requests.accounts import Accounts, Ticket

# Prometheus keeps every series that it has ever scraped, so the number of tenant labels must be bounded.
MAX_TENANTS = 64
OTHER_TENANTS = "other"
NO_TENANT = "none"

# Weight of the newest request in the running mean: the last 44 requests weigh one half, as (63/64)^44 = 0.5.
_NEWEST = 1 / 64


@dataclass(slots=True)
class RequestMix:
    """The average size of the requests received, as running means; all values are 0 before the first request.

    Attributes:
        requests: number of requests received.
        blocks: mean of the upper bound of a request's KV blocks, as admission computes it.
        sequences: mean number of sequences of a request.
    """

    requests: int = 0
    blocks: float = 0.0
    sequences: float = 0.0

    def observe(self, blocks: int, sequences: int) -> None:
        """Update the means with a request of `sequences` sequences, which need at most `blocks` KV blocks."""
        self.requests += 1
        # The first 64 requests form a plain mean; later ones all get the same weight.
        weight = max(_NEWEST, 1 / self.requests)
        self.blocks += weight * (blocks - self.blocks)
        self.sequences += weight * (sequences - self.sequences)


@dataclass(slots=True)
class TenantUsage:
    """Request and token counts of one tenant.

    `asked_blocks` is the sum, over the tenant's unfinished requests, of the upper bound of their KV blocks.
    """

    in_flight: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    generation_tokens: int = 0
    asked_blocks: int = 0


class Usage:
    """The average request size and each tenant's usage in one app, updated when a request starts or ends.

    The first MAX_TENANTS tenants each have their own TenantUsage, and all others share one. A request that is
    rejected before it reaches the engine is counted only under its outcome.
    """

    def __init__(self, accounts: Accounts, limits: Limits) -> None:
        self.mix = RequestMix()
        # the tenant of requests without an API key exists from the start, so that its metrics begin at zero
        self.tenants: dict[str, TenantUsage] = {NO_TENANT: TenantUsage()}
        self._limits = limits
        # id() of the ticket of an unfinished request -> upper bound of the request's KV blocks
        self._asked: dict[int, int] = {}
        accounts.on_submit.append(self._submitted)
        accounts.on_finish.append(self._finished)

    def tenant(self, name: str) -> TenantUsage:
        """Return the usage that counts requests of the tenant `name`; tenants beyond MAX_TENANTS share one."""
        label = name or NO_TENANT
        if label not in self.tenants and len(self.tenants) >= MAX_TENANTS:
            label = OTHER_TENANTS
        return self.tenants.setdefault(label, TenantUsage())

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
        if asked is None:  # a request that was rejected before it reached the engine
            return
        usage.in_flight -= 1
        usage.asked_blocks -= asked
        if ticket.counts is not None:
            usage.prompt_tokens += ticket.counts.prompt
            usage.generation_tokens += ticket.counts.completion
