"""/metrics read by the rules of the Gateway API inference extension's endpoint picker.

The rules are in pkg/epp/backend/metrics of kubernetes-sigs/gateway-api-inference-extension. A signal is named
by ``family`` or ``family{label=value,...}`` without quotes. The family must exist and the sample must have the
labels. The value is read as a *gauge*; any other type reads as 0. Block size and number of blocks are integer
labels of an info family, or gauges of their own.
"""

from __future__ import annotations

import asyncio

import pytest
from engines import Held
from prometheus_client.parser import text_string_to_metric_families

from tonnage.server.engines.fake import FakeEngine

# The picker's defaults for vLLM, and what a pool's configuration names for ours.
VLLM = {
    "queued": "vllm:num_requests_waiting",
    "running": "vllm:num_requests_running",
    "usage": "vllm:kv_cache_usage_perc",
}
OWN = {
    "queued": "tonnage_engine_requests{state=waiting}",
    "running": "tonnage_engine_requests{state=running}",
    "usage": "tonnage_pool_usage_ratio",
    "block_size": "tonnage_config_block_size_tokens",
    "num_blocks": "tonnage_config_num_blocks",
}


def sample(page: str, spec: str) -> tuple[dict[str, str], float]:
    """Return the labels and the value of the only sample that ``spec`` names.

    Raises:
        LookupError: No sample or several match; the message is the picker's.
    """
    name, _, rest = spec.partition("{")
    wanted = dict(pair.split("=") for pair in rest.rstrip("}").split(",")) if rest else {}
    families = [family for family in text_string_to_metric_families(page) if family.name == name]
    if not families:
        raise LookupError(f"metric family {name} not found")
    (family,) = families
    found = [s for s in family.samples if wanted.items() <= s.labels.items()]
    if not found:
        raise LookupError(f"no matching metric found for {name} with labels {wanted}")
    if len(found) > 1:
        raise LookupError(f"{spec} is ambiguous")  # the picker would take any of them
    return found[0].labels, found[0].value if family.type == "gauge" else 0.0


@pytest.mark.parametrize("compat", ["none", "vllm"])
async def test_metrics_include_the_signals_of_the_kubernetes_inference_extension(
    run_server, small_plan, compat: str
) -> None:
    engine = Held(small_plan(64, max_num_seqs=2), token_rate=50)
    async with run_server(engine, metrics_compat=compat) as server:
        tasks = [asyncio.create_task(server.complete(prompt=[n + 1] * 40, max_tokens=200)) for n in range(5)]
        await server.until(lambda: (engine.stats().running, engine.stats().waiting) == (2, 3))
        engine.held = True
        page = (await server.http.get("/metrics")).text
        used = engine.stats().pool.used
        for specs in (OWN, VLLM) if compat == "vllm" else (OWN,):
            assert sample(page, specs["running"])[1] == 2
            assert sample(page, specs["queued"])[1] == 3
            usage = sample(page, specs["usage"])[1]
            assert usage == pytest.approx(used / 63)
            assert 0 < usage <= 1
        assert sample(page, OWN["block_size"])[1] == 16
        assert sample(page, OWN["num_blocks"])[1] == 64
        if compat == "vllm":
            labels, _ = sample(page, "vllm:cache_config_info")
            assert (int(labels["block_size"]), int(labels["num_gpu_blocks"])) == (16, 64)
        else:
            with pytest.raises(LookupError, match="not found"):
                sample(page, VLLM["queued"])
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await server.until(lambda: server.state.accounts.in_flight == 0)


async def test_draining_server_is_not_ready_and_so_leaves_the_kubernetes_inference_pool(
    run_server, small_plan
) -> None:
    """A pool selects its pods by /ready, which becomes false before any request is cut off."""
    async with run_server(FakeEngine(small_plan(), token_rate=100)) as server:
        assert (await server.http.get("/ready")).status_code == 200
        running = asyncio.create_task(server.complete(max_tokens=30))
        await server.until(lambda: server.engine.stats().running == 1)
        drain = asyncio.create_task(server.state.drain(10))
        await asyncio.sleep(0)
        assert (await server.http.get("/ready")).status_code == 503
        assert (await server.http.get("/health")).status_code == 200
        assert (await running).status_code == 200
        await drain
