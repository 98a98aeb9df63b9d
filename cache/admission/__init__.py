"""Admission: who may start, and who may take the next block. Pure functions; nothing here holds blocks.

=============== ==================================================================================
``types``       requests, limits, answers
``reservation`` the most blocks one request can ever hold; what can never fit
``ledger``      what is reserved for the running requests
``snapshot``    what admission reads of them
``safety``      the law of guaranteed mode: states in which everybody can still finish
``peak``        the most blocks the running requests will hold over time, for given remaining lengths
``forecast``    output lengths still to come, learned from those that have ended
``loops``       the loops of peak and forecast over the running requests (not imported here: it is compiled)
``passing``     when the head of the queue begins: who may pass it
``policy``      guaranteed, predictive, greedy, no_evict: the rules of each
``controller``  policy, ledger and forecast together: what a manager asks (not imported here: it is compiled)
=============== ==================================================================================
"""

from tonnage.cache.admission.passing import Head
from tonnage.cache.admission.policy import AdmissionMode, Policy
from tonnage.cache.admission.reservation import (
    group_reservation,
    largest_prompt,
    refusal,
    reserved_blocks,
    split_reservation,
)
from tonnage.cache.admission.safety import Leaving, committed_peak, grant, is_safe, last_owners
from tonnage.cache.admission.types import (
    AdmissionRequest,
    Admit,
    Decision,
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
    "Decision",
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
    "split_reservation",
]
