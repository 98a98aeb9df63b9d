"""Settings of the prefix cache that are not limited to one tenant: published KV events, shared prefixes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class KVEventsConfig:
    """The value of ``--kv-events-config``; fields and defaults as in vLLM (vllm/config/kv_events.py, 0.32)."""

    enable_kv_cache_events: bool = False
    publisher: str = "zmq"
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""


@dataclass(frozen=True, slots=True)
class Sharing:
    """Prefix cache settings: the KV event publisher, and prompts whose KV blocks all cache salts share.

    ``events`` is None if no KV events are published. ``prefixes`` has the token ids of each shared prompt.
    """

    events: KVEventsConfig | None = None
    prefixes: tuple[tuple[int, ...], ...] = ()


def whole_blocks(prompt: Sequence[int], prefixes: Iterable[Sequence[int]], block_size: int) -> int:
    """Return the number of whole KV blocks of the longest prefix in ``prefixes`` with which ``prompt`` begins.

    Only whole blocks are compared, so the tokens of a prefix after its last whole block are ignored. Returns 0
    if the prompt begins with none of the prefixes.
    """
    most = 0
    for prefix in prefixes:
        blocks = len(prefix) // block_size
        tokens = blocks * block_size
        if most < blocks and tuple(prompt[:tokens]) == tuple(prefix[:tokens]):
            most = blocks
    return most


def events_config(value: str) -> KVEventsConfig | None:
    """Parse the JSON value of ``--kv-events-config``; return None if it disables events.

    Raises:
        ValueError: the value is invalid; the message says what is wrong.
    """
    try:
        given = json.loads(value)
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON: {error}") from None
    if not isinstance(given, dict):
        raise ValueError("the value is not a JSON object")
    known = {field.name: field for field in fields(KVEventsConfig)}
    if unknown := given.keys() - known.keys():
        raise ValueError(f"the key {min(unknown)} is none of {', '.join(known)}")
    for name, found in given.items():
        default = getattr(KVEventsConfig(), name)
        wanted = str if default is None else type(default)
        if type(found) is not wanted and not (name == "replay_endpoint" and found is None):
            raise ValueError(f"{name}: {found!r} is not of type {wanted.__name__}")
        if wanted is int and isinstance(found, int) and found < 1:
            raise ValueError(f"{name}: {found} is below 1")
    config = KVEventsConfig(**given)
    if config.publisher not in ("zmq", "null"):
        raise ValueError(f"publisher: {config.publisher!r} is neither zmq nor null")
    return config if config.enable_kv_cache_events and config.publisher == "zmq" else None
