"""The base class of both admission adapters: the policy, the rule in effect, and learned output lengths."""

from __future__ import annotations

from abc import ABC, abstractmethod

from tonnage.cache.admission import decide as decisions
from tonnage.cache.admission.auto import auto_of
from tonnage.cache.admission.decide import Rules, State
from tonnage.cache.admission.forecast import LengthForecast
from tonnage.cache.admission.policy import VLLM, AdmissionMode, Policy
from tonnage.cache.admission.types import Limits


class AdmissionAdapter(ABC):
    """Admission for one scheduler, whose books a subclass translates into a `State`.

    ``auto`` chooses the rule in mode ``auto``; it is None in other modes.

    Args:
        policy: Configured policy.
        limits: Limits of the pool.
        forecast: Learns and forecasts output lengths.
    """

    def __init__(self, policy: Policy, limits: Limits, forecast: LengthForecast) -> None:
        self.policy, self.limits = policy, limits
        self.auto = auto_of(policy, limits)
        in_effect = policy.under(VLLM) if policy.mode is AdmissionMode.AUTO else policy
        self.rules = Rules(in_effect, limits, forecast)

    @property
    def mode(self) -> AdmissionMode:
        """The mode in effect now; ``auto`` alternates between two other modes."""
        return self.rules.policy.mode

    def choose(self, in_system: int) -> None:
        """Let mode ``auto`` choose the rule, with ``in_system`` requests running and waiting."""
        if self.auto is not None:
            rule = self.auto.rule(in_system)
            self.rules.follow(self.policy.under(rule), rule.fresh)

    def committed(self) -> int:
        """Return the usable blocks that count as taken for a new request, with the margin to leave free."""
        return decisions.committed(self._state(), self.rules)

    def ended(self, output_tokens: int, tenant: str = "", prompt_tokens: int = 1, max_tokens: int = 1) -> None:
        """Learn from a sequence that ended by itself (not cancelled).

        Args:
            output_tokens: Tokens it produced.
            tenant: Name of its tenant.
            prompt_tokens: Tokens of its prompt that were not found in the prefix cache.
            max_tokens: Upper bound of the tokens it could have produced.
        """
        self.rules.forecast.ended(output_tokens, tenant)
        if self.auto is not None:
            self.auto.ended(prompt_tokens, output_tokens, max_tokens)

    @abstractmethod
    def _state(self, most: int = 0) -> State:
        """Return the state of the running requests, with space for ``most`` new ones."""
