"""Step `formats`: KV cache dtypes and quantized weights, against the plan and the model's own logits."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from tonnage.server.engines.hf.model.runner import ModelRunner
from tonnage.server.engines.hf.model.selfcheck import self_check

from .models import Target, spec, write
from .rows import FAILED, Row, exact, skipped

_KV_DTYPES = ("bfloat16", "fp8", "fp8_per_token_head", "int8_per_token_head")
_WEIGHTS = ("int8", "nf4")


def run(target: Target) -> Iterator[Row]:
    """Yield pool bytes and error for each KV cache dtype, and weight bytes for each quantization."""
    folder = write(spec("small", target.device), target.folder, "bfloat16")
    for kind in _KV_DTYPES:
        yield from _loaded(target, folder, f"KV cache in {kind}", kv_cache_dtype=kind)
    for kind in _WEIGHTS:
        if find_spec("bitsandbytes") is None or find_spec("accelerate") is None:
            yield skipped(f"weights in {kind}", "needs bitsandbytes and accelerate")
            continue
        yield from _loaded(target, folder, f"weights in {kind}", quantization=kind)


def _loaded(target: Target, folder: object, name: str, **flags: str) -> Iterator[Row]:
    try:
        plan = target.plan(folder, "bfloat16", **flags)  # type: ignore[arg-type]
        runner = ModelRunner(plan)
        yield exact(f"{name}: weights", runner.weights_bytes, plan.rank.weights_bytes)
        yield exact(f"{name}: KV pool", runner.pool.nbytes, plan.rank.kv_pool_bytes)
        yield Row(
            f"{name}: {runner.attention}", self_check(runner), "relative error of the logits", verdict="ok"
        )
    except Exception as error:  # one format that fails must not hide the others
        yield Row(name, "failed", verdict=FAILED, note=f"{type(error).__name__}: {error}"[:300])
