"""What the prefix cache tells others and lets others share: KV events, prompts common to all tenants."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path

from tonnage.planner.errors import DeploymentError
from tonnage.server.text.chat_template import ChatTemplate
from tonnage.server.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class KVEventsConfig:
    """``--kv-events-config``, fields and defaults as in vLLM (vllm/config/kv_events.py, 0.32)."""

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
    """``events`` None: none are published. ``prefixes``: token ids of prompts that every salt may share."""

    events: KVEventsConfig | None = None
    prefixes: tuple[tuple[int, ...], ...] = ()


def events_config(value: str) -> KVEventsConfig | None:
    """The JSON of the flag; None where it switches events off. Raises ValueError with what is wrong."""
    try:
        given = json.loads(value)
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON: {error}") from None
    if not isinstance(given, dict):
        raise ValueError("is not a JSON object")
    known = {field.name: field for field in fields(KVEventsConfig)}
    if unknown := given.keys() - known.keys():
        raise ValueError(f"{min(unknown)} is none of {', '.join(known)}")
    for name, found in given.items():
        default = getattr(KVEventsConfig(), name)
        wanted = str if default is None else type(default)
        if type(found) is not wanted and not (name == "replay_endpoint" and found is None):
            raise ValueError(f"{name}: {found!r} is no {wanted.__name__}")
        if wanted is int and found < 1:
            raise ValueError(f"{name}: {found} is below 1")
    config = KVEventsConfig(**given)
    if config.publisher not in ("zmq", "null"):
        raise ValueError(f"publisher: {config.publisher!r} is neither zmq nor null")
    return config if config.enable_kv_cache_events and config.publisher == "zmq" else None


def shared_prefix(
    path: Path, folder: Path, block_size: int, chat_template: Path | None = None
) -> tuple[int, ...]:
    """Token ids that every chat with the system prompt in ``path`` begins with; without a chat template (the
    model's, or the file's), those of a completion that begins with the text.

    Raises DeploymentError where they do not fill a block.
    """
    field = "shared_system_prompt"
    try:
        text = path.read_text(encoding="utf-8").removesuffix("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DeploymentError(f"cannot read {path}: {error}", field=field) from None
    tokenizer, template = Tokenizer.from_folder(folder), ChatTemplate.from_folder(folder, chat_template)
    prompts = [text, text]
    if template is not None:
        system = {"role": "system", "content": text}
        prompts = [template.render([system, {"role": "user", "content": word}]) for word in ("a", "0")]
    tokens = [tokenizer.encode(prompt, add_special_tokens=template is None) for prompt in prompts]
    ends = (at for at, pair in enumerate(zip(*tokens, strict=False)) if len(set(pair)) > 1)
    common = tokens[0][: next(ends, min(map(len, tokens)))]
    if len(common) < block_size:
        raise DeploymentError(
            f"{path} makes {len(common)} tokens, less than a KV block of {block_size}",
            field=field,
            hint="so short a prompt is not worth sharing: leave it out",
        )
    return tuple(common)
