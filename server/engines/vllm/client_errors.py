"""HTTP status 400 for requests that Tonnage's scheduler rejects inside a plain `vllm serve`.

vLLM alone returns 500. A scheduler can end a request with an error and a reason, but vLLM's HTTP layer answers
every error with "Internal server error". In the API process, between scheduler and HTTP layer, a collector
holds the outputs of each request (v1/engine/output_processor.py). The collector also accepts an exception and
raises it to the coroutine that awaits the outputs. A client error passes `AsyncLLM.generate` unchanged and
becomes status 400, or the last event of a stream. vLLM 0.30 to 0.33 behave alike.
"""

from __future__ import annotations

from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.outputs import RequestOutput
from vllm.v1.engine.output_processor import RequestOutputCollector


def return_rejections() -> None:
    """Patch vLLM's output collectors in this process to raise our scheduler's rejections as client errors.

    Further calls change nothing.
    """
    put = RequestOutputCollector.put
    if getattr(put, "tells", False):
        return

    def told(self: RequestOutputCollector, output: Any) -> None:
        why = _refusal(output)
        put(self, output if why is None else VLLMValidationError(why))

    told.tells = True  # type: ignore[attr-defined]
    RequestOutputCollector.put = told  # type: ignore[method-assign]


def _refusal(output: Any) -> str | None:
    """Return why our scheduler rejected the request of a vLLM output, or None for any other output.

    Only our rejections set `stop_reason` on an error; vLLM's own errors leave it empty.
    """
    if isinstance(output, RequestOutput):
        for sequence in output.outputs:
            if sequence.finish_reason == "error" and isinstance(sequence.stop_reason, str):
                return sequence.stop_reason
    return None
