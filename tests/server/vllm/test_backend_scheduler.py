"""Tests of the scheduler that `tonnage serve --backend vllm` puts into vLLM: modes, grammars, versions."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from typing import Any

import pytest
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm_steps import BLOCK, World, config, request, scheduler

from tonnage.cache.admission import AdmissionMode, Policy
from tonnage.planner.deployment import Deployment
from tonnage.planner.planning.build import make_plan
from tonnage.planner.plans import Plan
from tonnage.server.engines.sharing import Sharing
from tonnage.server.engines.vllm.arguments import scheduling_arguments
from tonnage.server.engines.vllm.grammars import BoundedGrammars
from tonnage.server.engines.vllm.scheduler.backend_scheduler import BackendScheduler
from tonnage.server.engines.vllm.stats_transport import take_stats

POLICIES = [
    Policy(),
    Policy(AdmissionMode.GUARANTEED, watermark=0.1),
    Policy(AdmissionMode.PREDICTIVE),
    Policy(AdmissionMode.PREDICTIVE, watermark=0.2),
    Policy(AdmissionMode.NO_EVICT),
    Policy(AdmissionMode.GREEDY),
]


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan("demo", Deployment(engine="vllm", max_model_len=2048, kv_cache_memory_bytes=2**28))


def made(plan: Plan, policy: Policy, *, grammars: bool = False, **flags: Any) -> Any:
    arguments = scheduling_arguments(plan, policy, Sharing(), grammars=grammars)
    assert arguments["scheduler_cls"] == f"{BackendScheduler.__module__}.{BackendScheduler.__name__}"
    configured = config(61, policy=arguments["scheduling_policy"], **flags)
    configured.additional_config = arguments["additional_config"]
    if grammars:  # without a tokenizer vLLM has no thread for them
        configured.model_config = copy(configured.model_config)
        configured.model_config.skip_tokenizer_init = False
    configured.parallel_config.worker_extension_cls = "tonnage.server.engines.vllm.worker.WorkerExtension"
    return scheduler(BackendScheduler, configured)


@pytest.mark.parametrize(
    ("policy", "grammars", "asynchronous"),
    [*((policy, False, True) for policy in POLICIES), (Policy(), True, True), (Policy(), True, False)],
)
def test_every_admission_mode_runs_in_vllm_and_reports_its_name(
    plan: Plan, policy: Policy, grammars: bool, asynchronous: bool
) -> None:
    ours = made(plan, policy, grammars=grammars, asynchronous=asynchronous)
    assert isinstance(ours, AsyncScheduler) == asynchronous
    assert isinstance(ours, BoundedGrammars) == grammars
    found = ours.admission.policy
    assert (found.mode, found.quantile, found.reserve) == (policy.mode, policy.quantile, policy.reserve)
    world = World(ours)
    for at in range(20):
        world.add(request(f"r{at}", 3 * BLOCK, 120, priority=at, arrival=at), 60)
    world.run()
    assert set(world.produced.values()) == {60}
    assert ours.fallbacks == 0
    told = take_stats(ours.make_stats().waiting_lora_adapters)
    assert told is not None
    assert (told.mode, told.received, told.unfinished) == (policy.mode, 20, 0)
    assert (world.preemptions > 0) == (policy.mode is AdmissionMode.GREEDY)


def test_scheduler_reports_statistics_without_the_stat_logger_plugin(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "another")  # the stat logger of a plain vLLM, not our engine
    assert take_stats(made(plan, Policy()).make_stats().waiting_lora_adapters) is not None


@pytest.mark.parametrize(("grammars", "asynchronous"), [(False, True), (True, False)])
def test_unknown_vllm_version_keeps_vllms_own_scheduler(
    plan: Plan, grammars: bool, asynchronous: bool, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr("vllm.__version__", "0.99.1")
    own = made(plan, Policy(), grammars=grammars, asynchronous=asynchronous)
    assert "this is 0.99.1" in caplog.text
    assert isinstance(own, AsyncScheduler if asynchronous else Scheduler)
    assert isinstance(own, BoundedGrammars) == grammars
    assert not hasattr(own, "admission")
    world = World(own)
    for at in range(20):
        world.add(request(f"r{at}", 3 * BLOCK, 120, priority=at, arrival=at), 60)
    world.run()
    assert set(world.produced.values()) == {60}
    assert take_stats(own.make_stats().waiting_lora_adapters) is None


def test_encoder_model_keeps_vllms_own_scheduler(plan: Plan) -> None:
    layout = replace(plan.kv_cache.layout, groups=())
    encoder = replace(plan, kv_cache=replace(plan.kv_cache, layout=layout))
    assert scheduling_arguments(encoder, Policy(), Sharing(), grammars=False) == {}
