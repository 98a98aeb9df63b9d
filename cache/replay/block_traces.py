"""Readers of traces whose records are not a request per line: agentic sessions, RAGPulse, vLLM's KV events.

- **Weka's agentic sessions** (huggingface.co/datasets/semianalysisai/cc-traces-weka-042026): one JSON object
  per session with ``requests`` (``t`` seconds, ``in`` and ``out`` tokens, ``hash_ids`` of full blocks) and
  ``block_size``. A folder of sessions is one trace, in which all sessions start at second 0.
- **RAGPulse** (github.com/flashserve/RAGPulse): JSON lines whose ``hash_ids`` name the components of a prompt.
  The other .jsonl files of the folder have the length of each component.
- **KV events** (vllm/distributed/kv_events.py, 0.32): JSON lines, or msgpack payloads one after the other. Each
  is a batch ``[timestamp, [event, ...], rank]``, in JSON also an object with ``ts`` and ``events``. A chain of
  ``BlockStored`` events is a request. A later event that adds one block to a chain is output. A request that
  stored no full block leaves no event.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from tonnage.cache.replay.json_text import parse_json
from tonnage.cache.replay.trace_request import TraceRequest, as_count, as_number

# Tokens per hash id that are used for RAGPulse, whose records name only the components of a prompt. It is
# vLLM's block size.
RAG_BLOCK = 16
# The components of a prompt, in the order of their text in it.
_COMPONENTS = ("sys_prompt", "passages_ids", "history", "web_search", "user_input")
_EVENTS = ("BlockStored", "BlockRemoved", "AllBlocksCleared")


def is_session(record: object) -> bool:
    """Return whether a JSON value is a session of Weka's traces."""
    return isinstance(record, dict) and "requests" in record and "hash_id_scope" in record


def is_rag_pulse(record: object) -> bool:
    """Return whether a JSON value is a request of RAGPulse."""
    return isinstance(record, dict) and isinstance(record.get("hash_ids"), dict)


def is_event_batch(record: object) -> bool:
    """Return whether a JSON value is a batch of KV events."""
    if isinstance(record, dict):
        return "ts" in record and "events" in record
    return isinstance(record, list) and len(record) in (2, 3) and isinstance(record[1], list)


# -- agentic sessions --------------------------------------------------------------------------------------


class SessionReader:
    """A reader of Weka's agentic sessions.

    It renumbers the hash ids of all sessions. Equal ids of two sessions become different if the ids are local
    to a session.
    """

    def __init__(self) -> None:
        self._next = count()
        self._numbers = defaultdict[tuple[str, int], int](self._next.__next__)

    def read(self, session: dict[str, Any]) -> Iterator[TraceRequest]:
        """Yield the requests of one agentic session, a JSON object of Weka's traces.

        Raises:
            ValueError: A field has an impossible value; the message names it.
            KeyError: A field is missing.
        """
        scope = session["hash_id_scope"]
        if scope not in ("local", "global"):
            raise ValueError(f"hash_id_scope is {scope!r:.40}, neither 'local' nor 'global'")
        block = as_count(session, "block_size", least=1)
        name = str(session["id"]) if scope == "local" else ""
        for place, request in enumerate(session["requests"]):
            try:
                yield self._request(request, name, block)
            except (ValueError, KeyError, TypeError) as error:
                reason = f"{error.args[0]} is missing" if isinstance(error, KeyError) else str(error)
                raise ValueError(f"request {place}: {reason}") from None

    def _request(self, record: dict[str, Any], session: str, block: int) -> TraceRequest:
        prompt, ids = as_count(record, "in", least=1), record["hash_ids"]
        if not isinstance(ids, list) or not all(type(each) is int for each in ids):
            raise ValueError("hash_ids is not a list of whole numbers")
        if len(ids) != prompt // block:
            raise ValueError(
                f"{len(ids)} hash_ids for {prompt // block} full blocks ({prompt} tokens in blocks of {block})"
            )
        numbers = [self._numbers[session, each] for each in ids]
        if prompt % block:  # tokens behind the last full block belong to this request only
            numbers.append(next(self._next))
        # A request that was cancelled before its first token has out = 0. It counts with one output token,
        # because its prompt was computed.
        output = max(1, as_count(record, "out"))
        return TraceRequest(as_number(record, "t"), prompt, output, hash_ids=tuple(numbers), hash_block=block)


# -- RAGPulse ----------------------------------------------------------------------------------------------


class RagPulseReader:
    """A reader of RAGPulse's requests.

    Args:
        folder: The folder with the files of component lengths.
        name: Name of the trace file in it.

    Raises:
        ValueError: A file of lengths cannot be read.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._lengths: dict[int, int] = {}
        self._numbers: dict[tuple[object, ...], int] = {}
        for path in sorted(folder.glob("*.jsonl")):
            if path.name != name:
                for line in path.read_text(encoding="utf-8").splitlines():
                    record = parse_json(line)
                    named = [key for key in record if key != "token_length"] if isinstance(record, dict) else []
                    if len(named) != 1 or "token_length" not in record:
                        break  # this file of the folder does not list lengths of prompt components
                    self._lengths[as_count(record, named[0])] = as_count(record, "token_length")
        if not self._lengths:
            raise ValueError(
                "no file beside it has the lengths of its components (JSON lines with the field token_length)"
            )

    def read(self, record: dict[str, Any]) -> TraceRequest:
        """Convert one RAGPulse record to a request; prompts with equal first components share hash ids."""
        unknown = sorted(set(record["hash_ids"]) - set(_COMPONENTS))
        if unknown:
            raise ValueError(
                f"hash_ids has the unknown key {unknown[0]!r:.40} (known: {', '.join(_COMPONENTS)})"
            )
        prompt = as_count(record, "input_length", least=1)
        pieces: list[tuple[object, int]] = []
        for component in _COMPONENTS:
            for each in record["hash_ids"][component]:
                if each not in self._lengths:
                    raise ValueError(f"the length of {component} {each!r:.40} is in no file beside the trace")
                pieces.append((each, self._lengths[each]))
        known = sum(length for _, length in pieces)
        if known < prompt:  # the chat template and separators count as unique to the request
            pieces.append((("own", len(self._numbers)), prompt - known))
        ids = tuple(self._blocks(pieces, prompt))
        arrival = float(record["timestamp"])
        return TraceRequest(arrival, prompt, as_count(record, "output_length", least=1), hash_ids=ids,
                            hash_block=RAG_BLOCK)  # fmt: skip

    def _blocks(self, pieces: list[tuple[object, int]], prompt: int) -> Iterator[int]:
        parent, at, content = -1, 0, list[object]()
        for piece, length in pieces:
            start = 0
            while start < length and at < prompt:
                taken = min(RAG_BLOCK - at % RAG_BLOCK, length - start, prompt - at)
                content.append((piece, start, taken))
                start, at = start + taken, at + taken
                if at % RAG_BLOCK == 0 or at == prompt:
                    parent = self._numbers.setdefault((parent, *content), len(self._numbers))
                    content = []
                    yield parent


# -- KV events ---------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Chain:
    """The KV blocks that a request stored, from KV events; ``last`` is the hash of its prompt's last block."""

    arrival: float
    last: object
    block_size: int
    output: int = 0


class EventReader:
    """A reader of KV event batches in order of time, which turns chains of stored blocks into requests."""

    def __init__(self) -> None:
        self._parents: dict[object, object] = {}  # block hash -> hash of the block before, None for the first
        self._numbers: dict[object, int] = {}
        self._open: dict[object, _Chain] = {}  # hash of a chain's last block -> the chain
        self._chains: list[_Chain] = []

    def read(self, batch: Any) -> None:
        """Read one batch of KV events and add its stored blocks to the chains of blocks, one chain per request.

        Raises:
            ValueError: An event is not understood; the message names the field.
            KeyError: A field is missing.
        """
        time, events = (batch["ts"], batch["events"]) if isinstance(batch, dict) else (batch[0], batch[1])
        for event in events:
            self._apply(event, as_number({"ts": time}, "ts"))

    def _apply(self, event: dict[str, Any], time: float) -> None:
        if not isinstance(event, dict):
            raise ValueError("an event is not a JSON object with a type")
        if event["type"] not in _EVENTS:
            raise ValueError(f"the event type {event['type']!r:.40} is unknown (known: {', '.join(_EVENTS)})")
        # Events of CPU tiers and of further KV cache groups repeat blocks of the first group on the GPU.
        if event["type"] != "BlockStored" or event.get("medium") not in (None, "GPU") or event.get("group_idx"):
            return
        size = as_count(event, "block_size", 1)
        hashes, parent = event["block_hashes"], event["parent_block_hash"]
        if not isinstance(hashes, list) or not hashes:
            raise ValueError("block_hashes is not a list with a hash")
        if not all(isinstance(each, int | str | bytes | None) for each in (*hashes, parent)):
            raise ValueError("block_hashes or parent_block_hash has a value that is no hash")
        before = parent
        for value in hashes:
            self._parents[value] = before
            before = value
        chain = self._open.pop(parent, None)
        if chain is not None and len(hashes) == 1:
            chain.output += size
        elif chain is not None and not chain.output:
            chain.last = before
        else:
            chain = _Chain(time, before, size)
            self._chains.append(chain)
        self._open[before] = chain

    def requests(self) -> Iterator[TraceRequest]:
        """Yield the requests found in all KV event batches, with the blocks of their prompts.

        Raises:
            ValueError: The chain of a block's parents leads back to the block.
        """
        for chain in self._chains:
            path, block = list[int](), chain.last
            while block is not None:  # the first block's parent is None or was not recorded
                path.append(self._numbers.setdefault(block, len(self._numbers)))
                if len(path) > len(self._parents) + 1:
                    raise ValueError(f"parent_block_hash: the block {block!r:.40} comes before itself")
                block = self._parents.get(block)
            yield TraceRequest(chain.arrival, len(path) * chain.block_size, max(1, chain.output),
                               hash_ids=tuple(path[::-1]), hash_block=chain.block_size)  # fmt: skip
