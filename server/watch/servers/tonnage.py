"""Reading of a Tonnage server: its plan and measured bytes from /memory, all other values from /metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tonnage.server.observe.status import COMPONENTS
from tonnage.server.watch.client import Client, Response, WatchError
from tonnage.server.watch.records import Counters, PlanSummary, Pool, Reading, Replica, ServerFacts, TierReading
from tonnage.server.watch.samples import Samples
from tonnage.server.watch.servers.families import read_auto, read_headroom
from tonnage.server.watch.servers.json_values import mapping, number, text

_MEASURED = ("weights", "kv_pool", "activations", "framework", "lora", "kv_tier", "free")


class TonnageServer:
    """A reader of a Tonnage server's metrics and settings over HTTP."""

    title = "Tonnage"

    def matches(self, client: Client, samples: Samples) -> bool:
        """Return whether the metrics page has Tonnage's metrics and the server answers /memory.

        `tonnage watch --port` and the plug-in in vLLM write the same metrics but have no /memory.
        """
        return samples.has_prefix("tonnage_") and client.get("/memory").status == 200

    def metrics_hint(self, client: Client) -> str | None:
        """Return None: the metrics of a Tonnage server cannot be turned off."""
        return None

    def facts(self, client: Client, samples: Samples) -> ServerFacts:
        """Return the name of the model that a Tonnage server serves; its plan has all other facts."""
        return ServerFacts(self.title, None, text(_memory(client).get("model")), model=None)

    def planned(self, client: Client, samples: Samples) -> PlanSummary | None:
        """Return the memory plan that a Tonnage server reports in /memory."""
        try:
            return _planned(mapping(_memory(client)["plan"]))
        except (KeyError, TypeError, IndexError) as error:
            raise WatchError(
                f"the plan in {client.url}/memory has another format than this release's: {error}",
                hint="use the server's release of tonnage",
            ) from None

    def read(self, client: Client, samples: Samples, page: Response, facts: ServerFacts) -> Reading:
        """Return a Tonnage server's running requests, KV pool and counters at this moment."""
        memory = _memory(client)
        measured = mapping(memory.get("measured"))
        state = {labels["state"]: round(value) for labels, value in samples.of("tonnage_engine_requests")}
        return Reading(
            replicas=(Replica(state.get("running"), state.get("waiting"), _pool(memory)),),
            counters=Counters(
                preemptions=samples.count("tonnage_preemptions_total"),
                prompt_tokens=samples.count("tonnage_prompt_tokens_total"),
                generation_tokens=samples.count("tonnage_generation_tokens_total"),
                prefix_query_tokens=samples.count("tonnage_prefix_query_tokens_total"),
                prefix_hit_tokens=samples.count("tonnage_prefix_hit_tokens_total"),
            ),
            measured={
                name: value
                for name in _MEASURED
                if (value := number(measured.get(f"{name}_bytes"))) is not None
            },
            headroom=read_headroom(samples),
            auto=read_auto(samples),
            tier=_tier(samples),
        )


def _tier(samples: Samples) -> TierReading | None:
    """Return the state of the hf engine's KV tier (host memory, disk), or None without one."""
    if "tonnage_tier_host_size" not in samples:
        return None
    return TierReading(
        host_size=samples.count("tonnage_tier_host_size"),
        host_used=samples.count("tonnage_tier_host_used"),
        disk_size=samples.count("tonnage_tier_size"),
        disk_used=samples.count("tonnage_tier_used"),
        hit_tokens=samples.count("tonnage_tier_host_hit_tokens_total"),
        spent_seconds=samples.total("tonnage_tier_spent_seconds_total"),
        saved_seconds=samples.total("tonnage_tier_saved_seconds_total"),
    )


def _planned(plan: Mapping[str, Any]) -> PlanSummary:
    cache, model, flags = plan["kv_cache"], plan["model"], plan["deployment"]
    rank = plan["ranks"][plan["worst_rank"]]
    group: Mapping[str, Any] = next(iter(cache["groups"]), {})
    device = flags["device"]
    return PlanSummary(
        plan_id=plan["plan_id"],
        model=model["id"],
        architecture=model["architecture"],
        engine=flags["engine"],
        quantization=flags["quantization"] or "none",
        device=f"{device}:{plan['worst_rank']}" if device != "cpu" else "cpu",
        components={name: rank[key] for name, key in COMPONENTS.items()},
        block_size=group.get("block_size", 1),
        bytes_per_block=group.get("bytes_per_block", 0),
        max_model_len=flags["max_model_len"],
        num_blocks=cache["num_blocks"],
        tokens=cache["tokens"],
        revision=plan["revision"],
    )


def _memory(client: Client) -> Mapping[str, Any]:
    found = mapping(client.get("/memory").json())
    if "plan" not in found or "pool" not in found:
        raise WatchError(f"{client.url}/memory is not from a Tonnage server, although its /metrics is")
    return found


def _pool(memory: Mapping[str, Any]) -> Pool | None:
    pool = mapping(memory["pool"])
    blocks = mapping(pool.get("blocks"))
    total, usable, size = number(blocks.get("num")), number(blocks.get("usable")), pool.get("block_size_tokens")
    if not total or usable is None or number(size) is None:
        return None
    return Pool(total, usable, int(size or 1), number(blocks.get("used")), number(blocks.get("cached")))
