"""The Ray Serve application: ``serve run tonnage.server.ray.app:build model=demo replicas=2``.

The application has two Ray deployments. One is the API (tokenizer, OpenAI protocol, accounts; without torch).
The other has N engine replicas, which the API calls through a Ray handle. The plan is made once, before Ray
places any process, and determines the resources that Ray reserves for a replica.
"""

from __future__ import annotations

import math
import os
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy, RequestRouterConfig
from ray.serve.handle import DeploymentHandle

from tonnage.planner.errors import DeploymentError, DoesNotFit
from tonnage.planner.planning.build import plan_source
from tonnage.planner.plans import Plan
from tonnage.planner.source.resolve import resolve_model
from tonnage.server.app import create_app
from tonnage.server.demo.model import ensure_demo
from tonnage.server.engines.capacity import held_to
from tonnage.server.ray.engine import RayEngine
from tonnage.server.ray.replica import EngineReplica
from tonnage.server.ray.router import PrefixHeadroomRouter
from tonnage.server.settings import Settings, load_settings

# Ray's autoscaler adds engine replicas when more requests than this are waiting per replica.
_WAITING_PER_REPLICA = 4.0
# Ray's autoscaler removes a replica only if this fraction of the other replicas' KV pools stays free.
_SPARE_SHARE = 0.3


class ClusterOptions(BaseModel):
    """Options of a Ray cluster beside Settings; autoscaling is on when `max_replicas` exceeds `replicas`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    replicas: int = Field(1, ge=1, description="engine replicas; with autoscaling the least")
    max_replicas: int | None = Field(None, ge=1, description="most replicas autoscaling may start")
    cpus_per_replica: float | None = Field(None, gt=0, description="CPU cores of a replica on a CPU host")


def build(args: dict[str, Any]) -> serve.Application:
    """Return the Ray Serve application for the given settings.

    `args` has fields of Settings (``model=demo kv_cache_memory_bytes=512MiB``) and of ClusterOptions.

    Raises:
        DeploymentError: an option is unknown or invalid.
        DoesNotFit: the plan does not fit; no process has been placed.
    """
    own = {name: args[name] for name in ClusterOptions.model_fields if name in args}
    settings = load_settings(**{name: value for name, value in args.items() if name not in own})
    try:
        options = ClusterOptions(**own)
    except ValueError as error:
        raise DeploymentError(str(error).splitlines()[-1].strip(), field="/".join(own)) from None
    if options.max_replicas is not None and options.max_replicas < options.replicas:
        raise DeploymentError(
            f"{options.max_replicas} is less than replicas = {options.replicas}", field="max_replicas"
        )
    plan = _planned(settings)
    engine = serve.deployment(
        EngineReplica,
        name="engine",
        # A replica's own admission decides when a request runs. Ray's default limit of 5 requests per replica
        # would hold requests back.
        max_ongoing_requests=settings.max_num_queued_reqs,
        health_check_period_s=2.0,
        graceful_shutdown_timeout_s=settings.drain_seconds,
        request_router_config=RequestRouterConfig(
            request_router_class=PrefixHeadroomRouter, request_routing_stats_period_s=1.0
        ),
        **placement(plan, options),
        **_scaling(options),
    )
    # The API has one instance, so that the quotas of keys and the length of the queue are counted in one place.
    api = serve.deployment(
        Ingress,
        name="api",
        num_replicas=1,
        max_ongoing_requests=settings.max_num_queued_reqs,
        graceful_shutdown_timeout_s=settings.drain_seconds,
        # The API reserves no resources in Ray, so that it can start on a node that engines fill.
        ray_actor_options={"num_cpus": 0},
    )
    return api.bind(settings, plan, engine.bind(settings, plan))


def placement(plan: Plan, options: ClusterOptions) -> dict[str, Any]:
    """Return the resources that Ray reserves for one replica, from its plan.

    A plan for GPUs takes one GPU for each rank (tensor x pipeline parallel), packed on as few nodes as
    possible. A plan for a CPU takes cores and the planned bytes of host memory.
    """
    if plan.deployment.device != "cpu":
        return {
            "placement_group_bundles": [{"CPU": 1, "GPU": 1} for _ in plan.ranks],
            "placement_group_strategy": "PACK",
        }
    cores = options.cpus_per_replica or float(os.cpu_count() or 1)
    return {"ray_actor_options": {"num_cpus": cores, "memory": sum(rank.used_bytes for rank in plan.ranks)}}


def replicas_wanted(context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """Return the number of replicas for Ray's autoscaler, and an empty autoscaling state.

    Replicas are added when more than `_WAITING_PER_REPLICA` requests per replica are waiting. A replica is
    removed only when no request waits and the other replicas' pools can take all reserved blocks and still have
    the fraction `_SPARE_SHARE` free. Otherwise scaling down might at once be followed by scaling up.
    """
    waiting, now = _sum(context, "waiting"), context.current_num_replicas
    if waiting > _WAITING_PER_REPLICA * now:
        return math.ceil(waiting / _WAITING_PER_REPLICA), {}
    if waiting == 0 and _sum(context, "promised_share") <= (1 - _SPARE_SHARE) * (now - 1):
        return max(1, now - 1), {}
    return now, {}


def _sum(context: AutoscalingContext, name: str) -> float:
    return float(sum((context.aggregated_metrics or {}).get(name, {}).values()))


def _scaling(options: ClusterOptions) -> dict[str, Any]:
    if options.max_replicas is None or options.max_replicas == options.replicas:
        return {"num_replicas": options.replicas}
    return {
        "autoscaling_config": AutoscalingConfig(
            min_replicas=options.replicas,
            max_replicas=options.max_replicas,
            policy=AutoscalingPolicy(policy_function=replicas_wanted),
        )
    }


def _planned(settings: Settings) -> Plan:
    if settings.model == "demo":
        ensure_demo()
    source, deployment = resolve_model(settings.model), settings.deployment()
    plan = held_to(plan_source(source, deployment), source, deployment)
    if not plan.fits:
        raise DoesNotFit("; ".join(plan.reasons), field="model")
    return plan


@serve.ingress()
class Ingress:
    """The HTTP API in front of all replicas; `/replicas` lists their addresses for Prometheus."""

    def __init__(self, settings: Settings, plan: Plan, engine: DeploymentHandle) -> None:
        self._settings = settings
        self._engine = RayEngine(plan, engine)

    def __serve_build_asgi_app__(self) -> FastAPI:
        app = create_app(self._settings, self._engine)
        app.add_api_route("/replicas", self._targets, include_in_schema=False)
        return app

    async def _targets(self) -> list[dict[str, Any]]:
        return [
            {"targets": [report.address], "labels": {"replica": report.replica_id}}
            for report in self._engine.reports
        ]
