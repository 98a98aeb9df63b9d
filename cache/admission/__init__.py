"""Admission: which requests may start, and which sequences may take more blocks. It owns no blocks.

=============== ==================================================================================
``types``       requests, limits and results
``reservation`` the upper bound of the blocks of one request; requests that can never fit
``ledger``      the reservations of the running requests
``snapshot``    the running requests' block and token counts, which admission reads
``safety``      guaranteed mode: states in which every request can still finish
``peak``        the largest number of blocks in use over time, for given remaining lengths
``forecast``    remaining output lengths, learned from requests that have ended
``loops``       the loops of peak and forecast over the running requests (compiled, not imported here)
``passing``     when the head of the queue can start, and which requests may pass it
``policy``      the modes guaranteed, predictive, greedy, no_evict and auto
``shares``      the fair division of an engine among several API keys
``decide``      the decisions, as pure functions of a state
``controller``  the decisions applied to our block manager (compiled, not imported here)
``cost``        the seconds of an engine step, fitted online
``rehearsal``   a simulation of recent requests under an admission rule, for the mode auto
``auto``        the mode auto: the choice between admission rules by simulation
=============== ==================================================================================
"""

from tonnage.cache.admission.policy import Policy
from tonnage.cache.admission.reservation import group_reservation, largest_prompt, refusal, reserved_blocks
from tonnage.cache.admission.safety import Leaving, committed_peak, grant, is_safe, last_owners
from tonnage.cache.admission.types import (
    AdmissionMode,
    AdmissionRequest,
    Admit,
    Head,
    Limits,
    Never,
    NeverReason,
    Wait,
    WaitReason,
)

__all__ = [
    "AdmissionMode",
    "AdmissionRequest",
    "Admit",
    "Head",
    "Leaving",
    "Limits",
    "Never",
    "NeverReason",
    "Policy",
    "Wait",
    "WaitReason",
    "committed_peak",
    "grant",
    "group_reservation",
    "is_safe",
    "largest_prompt",
    "last_owners",
    "refusal",
    "reserved_blocks",
]
