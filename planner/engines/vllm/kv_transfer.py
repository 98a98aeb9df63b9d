"""vLLM's KV connector of a deployment: which store holds offloaded blocks, and with which settings.

Two flags select it: --kv-offloading-size with --kv-offloading-backend, which vLLM translates into a connector
(_post_init_kv_transfer_config in config/vllm.py), and --kv-transfer-config, whose JSON names the connector.
Named source files are from vLLM 0.32.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tonnage.planner.deployment import Deployment
from tonnage.planner.errors import DeploymentError, did_you_mean

CONFIG, SIZE, BACKEND = "--kv-transfer-config", "--kv-offloading-size", "--kv-offloading-backend"
# Connectors that keep blocks beside the pool, and the keys of their kv_connector_extra_config
# (v1/kv_offload/, kv_connector/v1/offloading/config.py, simple_cpu_offload_connector.py).
_NATIVE = (
    "cpu_bytes_to_use", "num_cpu_blocks", "block_size", "blocks_per_chunk", "eviction_policy",
    "cache_policy_module_path", "store_threshold", "max_tracker_size", "offload_prompt_only", "spec_name",
    "spec_module_path", "secondary_tiers", "backpressure", "canonical_layout", "self_describing_kv_events",
    "enable_telemetry",
)  # fmt: skip
_SIMPLE = (
    "cpu_bytes_to_use", "cpu_bytes_to_use_per_rank", "lazy_offload", "kv_offload_backend", "disk_path",
    "disk_capacity_bytes", "disk_buffer_slots", "use_page_cache",
)  # fmt: skip
KEYS: dict[str, tuple[str, ...]] = {"OffloadingConnector": _NATIVE, "SimpleCPUOffloadConnector": _SIMPLE}
LMCACHE, LMCACHE_MP = "LMCacheConnectorV1", "LMCacheMPConnector"
# Connectors that move blocks between servers and keep none (kv_connector/factory.py).
_WITHOUT = (
    "NixlConnector", "NixlPullConnector", "NixlPushConnector", "MooncakeConnector", "MoRIIOConnector",
    "ExampleConnector", "ExampleHiddenStatesConnector", "DecodeBenchConnector",
)  # fmt: skip
# Fields of KVTransferConfig (config/kv_transfer.py).
_FIELDS = (
    "kv_connector", "kv_role", "kv_connector_extra_config", "kv_buffer_device", "kv_buffer_size", "engine_id",
    "kv_rank", "kv_parallel_size", "kv_ip", "kv_port", "kv_connector_module_path", "enable_permute_local_kv",
    "kv_load_failure_policy",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Connector:
    """A KV connector of vLLM and the settings in its kv_connector_extra_config.

    Attributes:
        field: the flag that selected the connector, for error messages.
    """

    name: str
    extra: Mapping[str, Any] = field(default_factory=dict)
    field: str = CONFIG

    def size(self, key: str, default: int | None = None) -> int | None:
        """Return the connector's setting ``key``, a number of bytes or blocks, or ``default`` if not set.

        Raises:
            DeploymentError: the value is no whole number of at least one.
        """
        value = self.extra.get(key, default)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 1 or value != int(value):
            raise DeploymentError(f"{key} is {value!r:.60}, not a whole number of at least 1", field=self.field)
        return int(value)


def connector_of(flags: Deployment) -> Connector | None:
    """Return the connector that offloads KV blocks to host memory or disk, or None if no flag selects one.

    Raises:
        DeploymentError: the flags contradict each other, or a connector or setting is not known.
    """
    given = _given(flags.kv_transfer_config)
    if flags.kv_offloading_bytes and given is not None and given.name:
        raise DeploymentError(
            f"vLLM would replace the {given.name} of {CONFIG} by its own connector; give one of them, not both",
            field=SIZE,
        )
    if flags.kv_offloading_bytes:
        if flags.kv_offloading_backend == "lmcache":
            return Connector(LMCACHE_MP, {"l1_size": flags.kv_offloading_bytes}, SIZE)
        extra = dict(given.extra) if given is not None else {}
        return Connector("OffloadingConnector", {**extra, "cpu_bytes_to_use": flags.kv_offloading_bytes}, SIZE)
    if given is None:
        return None
    if not given.name:
        raise DeploymentError("names no kv_connector", field=CONFIG, hint=f"one of {', '.join(_known())}")
    return None if given.name in _WITHOUT else given


def _known() -> tuple[str, ...]:
    return (*KEYS, LMCACHE, LMCACHE_MP)


def _given(text: str) -> Connector | None:
    """Return the KV connector that a --kv-transfer-config names, or None for an empty object."""
    try:
        record = json.loads(text)
    except ValueError as error:
        raise DeploymentError(f"is no JSON: {str(error)[:80]}", field=CONFIG) from None
    if not isinstance(record, dict):
        raise DeploymentError("is not a JSON object", field=CONFIG)
    if not record:
        return None
    for key in record:
        if key not in _FIELDS:
            hint = did_you_mean(key, _FIELDS)
            raise DeploymentError(f"vLLM's KVTransferConfig has no field {key[:60]!r}", field=CONFIG, hint=hint)
    name, extra = record.get("kv_connector") or "", record.get("kv_connector_extra_config") or {}
    if not isinstance(name, str) or not isinstance(extra, dict):
        raise DeploymentError(
            "kv_connector must be a string and kv_connector_extra_config an object", field=CONFIG
        )
    names = (*_known(), *_WITHOUT)
    if name and name not in names:
        hint = did_you_mean(name, names) or f"one of {', '.join(_known())}"
        raise DeploymentError(f"the planner does not know kv_connector {name[:60]!r}", field=CONFIG, hint=hint)
    for key in extra if name in KEYS else ():
        if key not in KEYS[name]:
            hint = did_you_mean(key, KEYS[name]) or f"one of {', '.join(KEYS[name])}"
            raise DeploymentError(f"{key[:60]!r} is not a setting of {name}", field=CONFIG, hint=hint)
    return Connector(name, extra)
