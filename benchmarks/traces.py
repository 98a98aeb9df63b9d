"""Traces for the benchmarks of the block manager, with generated token ids.

Public traces identify each 512-token piece of a prompt by an id and contain no text. Token ``j`` of piece
``h`` is a fixed function of (h, j), so two prompts share exactly the tokens of their common pieces.
`synthetic` generates traces of other shapes (loops, popular documents, scans, chats), so that no rule is
tuned to one file.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tonnage.cache.replay.trace import read_trace

VOCABULARY = 151_936  # Qwen2.5's, config.json vocab_size


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request: the pieces of its prompt, and its lengths in tokens."""

    pieces: tuple[int, ...]
    prompt_tokens: int
    output_tokens: int
    piece_tokens: int = 512


def load(path: Path, limit: int | None = None) -> list[TraceRequest]:
    """Return the first requests of a trace file; without prefix information, their prompts share nothing."""
    loads: list[TraceRequest] = []
    unshared = 0
    for request in read_trace(path, limit=limit).requests:
        pieces, size = request.hash_ids, request.hash_block
        if pieces is None:
            count = -(-request.prompt_tokens // size)
            pieces = tuple(range(unshared, unshared + count))
            unshared += count
        loads.append(TraceRequest(pieces, request.prompt_tokens, max(1, request.output_tokens), size))
    return loads


class Tokens:
    """A generator of prompts that caches their pieces.

    With ``loads``, all pieces are generated at once. Otherwise the garbage collector would handle ten
    thousands of new arrays during a timed run.
    """

    def __init__(self, loads: Sequence[TraceRequest] = ()) -> None:
        self._pieces: dict[tuple[int, int], array[int]] = {}
        for load in loads:
            for piece in load.pieces:
                self._piece(piece, load.piece_tokens)

    def prompt(self, request: TraceRequest) -> list[int]:
        """Return the prompt's token ids as a new list."""
        out = array("i")
        for piece in request.pieces:
            out += self._piece(piece, request.piece_tokens)
        return out[: request.prompt_tokens].tolist()

    def _piece(self, piece: int, size: int) -> array[int]:
        known = self._pieces.get((piece, size))
        if known is None:
            index = np.arange(size, dtype=np.int64)
            tokens = (piece * 7919 + index * 104_729 + (index >> 4) * 31) % VOCABULARY
            # Every 16 tokens encode the piece's id in two tokens, so different pieces never share a block.
            tokens[0::16], tokens[1::16] = piece % VOCABULARY, piece // VOCABULARY
            known = self._pieces[piece, size] = array("i", tokens.astype(np.int32).tobytes())
        return known

    @staticmethod
    def output(request: int, position: int) -> int:
        """Return token ``position`` of the answer to a request; answers share no tokens."""
        return (request * 2003 + position * 7 + 13) % VOCABULARY


def synthetic(kind: str, requests: int, seed: int = 0) -> list[TraceRequest]:
    """Return a generated trace of ``requests`` requests.

    - ``loop``: documents requested cyclically.
    - ``zipf``: documents by popularity (exponent 0.9).
    - ``scan``: popular documents among prompts that occur once.
    - ``chat``: conversations that grow turn by turn after one of four system prompts.
    - ``shift``: popular documents that change after each quarter.
    """
    random = np.random.default_rng(seed)
    out: list[TraceRequest] = []
    fresh = 1_000_000

    def document(number: int, pieces: int) -> tuple[int, ...]:
        return tuple(range(number * 64, number * 64 + pieces))

    def add(pieces: Sequence[int]) -> None:
        out.append(
            TraceRequest(
                tuple(pieces), len(pieces) * 512 + int(random.integers(1, 512)), int(random.integers(1, 400))
            )
        )

    weights = 1 / np.arange(1, 2001) ** 0.9
    weights /= weights.sum()
    chats: list[list[int]] = []
    for number in range(requests):
        fresh += 64
        if kind == "loop":
            pieces = list(document(number % 400, 16))
        elif kind in ("zipf", "shift"):
            shift = 2000 * (4 * number // requests) if kind == "shift" else 0
            chosen = int(random.choice(2000, p=weights)) + shift
            pieces = list(document(chosen, 4 + chosen % 24))
        elif kind == "scan":
            repeat = random.random() < 0.3
            pieces = (
                list(document(int(random.choice(2000, p=weights)), 12))
                if repeat
                else list(range(fresh, fresh + 32))
            )
        elif kind == "chat":
            if not chats or random.random() < 0.25:
                chats.append([int(random.integers(4))])
            # Newer chats continue more often; some continue after a long pause.
            at = len(chats) - 1 - min(len(chats) - 1, int(random.exponential(30)))
            chats[at] += range(fresh, fresh + int(random.integers(1, 12)))
            pieces = chats[at]
            if len(pieces) > 120:
                chats[at] = [int(random.integers(4))]
        else:
            raise ValueError(f"unknown kind of trace: {kind}")
        add([*pieces, fresh + 63])
    return [TraceRequest(r.pieces, min(r.prompt_tokens, len(r.pieces) * 512), r.output_tokens) for r in out]
