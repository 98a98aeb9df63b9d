"""HTTP status 400 for requests that our scheduler rejects inside a plain `vllm serve`.

vLLM alone returns 500. A scheduler can end a request with an error and a reason, but vLLM's HTTP layer answers
every error with "Internal server error". Between them, in the API process, a collector holds the outputs of a
request (v1/engine/output_processor.py). The collector also takes an exception and raises it where the outputs
are awaited. A client error passes `AsyncLLM.generate` unchanged and becomes status 400, or the last event of a
stream. The same holds in vLLM 0.30 to 0.33.
"""

from __future__ import annotations

from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.outputs import RequestOutput
from vllm.v1.engine.output_processor import RequestOutputCollector


def return_rejections() -> None:
    """Make vLLM's collectors in this process raise our scheduler's rejections; further calls change nothing."""
    put = RequestOutputCollector.put
    if getattr(put, "tells", False):
        return

    def told(self: RequestOutputCollector, output: Any) -> None:
        why = _refusal(output)
        put(self, output if why is None else VLLMValidationError(why))

    told.tells = True  # type: ignore[attr-defined]
    RequestOutputCollector.put = told  # type: ignore[method-assign]


def _refusal(output: Any) -> str | None:
    """Return the reason why our scheduler ended a request, or None for any other output.

    vLLM's own errors have no `stop_reason`.
    """
    if isinstance(output, RequestOutput):
        for sequence in output.outputs:
            if sequence.finish_reason == "error" and isinstance(sequence.stop_reason, str):
                return sequence.stop_reason
    return None
