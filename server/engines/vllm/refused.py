"""What can never fit is the client's to change: he is told 400 with the numbers, where vLLM alone says 500.

A scheduler can end a request with an error and a reason, and vLLM's HTTP layer says of every error "Internal
server error". Between the two, in the API process, a request's outputs wait in a collector that also takes an
exception and raises it where they are awaited (v1/engine/output_processor.py); one of a client's fault passes
`AsyncLLM.generate` as it is and becomes 400, or the last event of a stream. The same in 0.30 to 0.33.
"""

from __future__ import annotations

from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.outputs import RequestOutput
from vllm.v1.engine.output_processor import RequestOutputCollector


def tell_clients() -> None:
    """From now on the clients of this process are told why our scheduler refuses; once or more often."""
    put = RequestOutputCollector.put
    if getattr(put, "tells", False):
        return

    def told(self: RequestOutputCollector, output: Any) -> None:
        why = _refusal(output)
        put(self, output if why is None else VLLMValidationError(why))

    told.tells = True  # type: ignore[attr-defined]
    RequestOutputCollector.put = told  # type: ignore[method-assign]


def _refusal(output: Any) -> str | None:
    """Why our scheduler has ended it; None: it has not. vLLM gives an error no reason of its own."""
    if isinstance(output, RequestOutput):
        for sequence in output.outputs:
            if sequence.finish_reason == "error" and isinstance(sequence.stop_reason, str):
                return sequence.stop_reason
    return None
