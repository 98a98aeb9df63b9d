"""The base class that connects admission to a scheduler: Tonnage's own scheduler, or vLLM's.

It keeps the admission policy, the rule in effect and the learned output lengths.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from tonnage.cache.admission import decide as decisions
from tonnage.cache.admission.auto import auto_of
from tonnage.cache.admission.decide import Rules, State
from tonnage.cache.admission.forecast import LengthForecast
from tonnage.cache.admission.policy import VLLM, Policy
from tonnage.cache.admission.shares import Shares
from tonnage.cache.admission.types import AdmissionMode, Limits
from tonnage.cache.blocks.state import Int64Array


class AdmissionAdapter(ABC):
    """Admission for one scheduler; a subclass converts the scheduler's requests and blocks into a `State`.

    A `State` has what the decisions of admission read: counts of tokens and blocks for each running request.

    In admission mode ``auto`` the attribute ``auto`` chooses the rule; it is None in other modes.

    Args:
        policy: Configured admission policy.
        limits: Sizes of the block pool and of a step.
        forecast: Learns and forecasts output lengths.
    """

    def __init__(self, policy: Policy, limits: Limits, forecast: LengthForecast) -> None:
        self.policy, self.limits = policy, limits
        self.auto = auto_of(policy, limits)
        self.shares = Shares(policy.keys, limits)
        in_effect = policy.under(VLLM) if policy.mode is AdmissionMode.AUTO else policy
        self.rules = Rules(in_effect, limits, forecast)

    @property
    def mode(self) -> AdmissionMode:
        """The admission mode in effect now; ``auto`` alternates between greedy and predictive."""
        return self.rules.policy.mode

    def choose(self, in_system: int) -> None:
        """Let admission mode ``auto`` choose its rule for ``in_system`` running and waiting requests."""
        if self.auto is not None:
            self.rules.follow(self.policy.under(self.auto.rule(in_system, self._running)))

    def _running(self) -> Int64Array:
        """Return three lengths of each running request in tokens, int64 [running, 3].

        The columns are the prompt, the output so far and max_tokens.
        """
        state = self._state()
        produced, prompt = state.produced, state.snapshot.prompt
        return np.stack((prompt, produced, produced + state.snapshot.output_left), axis=1).astype(np.int64)

    def committed(self) -> int:
        """Return the number of KV blocks that are not available to a new request.

        Running requests hold these blocks or are forecast to take them, or the policy keeps them free (margin).
        """
        return decisions.committed(self._state(), self.rules)

    def ended(self, output_tokens: int, tenant: str = "", prompt_tokens: int = 1, max_tokens: int = 1) -> None:
        """Record the output length of a sequence that finished and was not cancelled.

        Args:
            output_tokens: Output tokens of the sequence.
            tenant: Name of the tenant that sent the request.
            prompt_tokens: Prompt tokens that were not found in the prefix cache.
            max_tokens: Upper bound of the output tokens that the request asked for.
        """
        self.rules.forecast.ended(output_tokens, tenant)
        if self.auto is not None:
            self.auto.ended(prompt_tokens, output_tokens, max_tokens)

    @abstractmethod
    def _state(self, most: int = 0) -> State:
        """Return the `State` of the running requests, with array space for ``most`` further requests."""
