"""The request log for `tonnage replay`: the size of each request and output, without text.

A prompt is logged as one number per block of tokens. Equal numbers mean equal prefixes of the same tenant and
cache salt. Numbers are given in the order in which blocks are first seen, so they reveal nothing of the tokens.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from tonnage.cache.replay.trace import log_line
from tonnage.cache.replay.trace_request import TraceRequest
from tonnage.planner.errors import DeploymentError
from tonnage.server.requests.accounts import Ticket

log = logging.getLogger("tonnage.server")

# The numbers that stand for blocks of prompts stay below this, because trace readers accept no larger integers
# (cache/replay/trace.py).
_IDS = 2**30
# The request log remembers the numbers of this many blocks of prompts, in at most about 150 MiB. A forgotten
# block gets a new number when it is seen again.
_REMEMBERED = 2**20


class RequestLog:
    """A log file with one line for each sequence that produced tokens.

    A line that cannot be written, as on a full disk, is counted in `lost`, and the failure is logged once.
    Requests are still answered.

    Args:
        path: the file to append to.
        block_size: number of tokens per hashed block.

    Raises:
        DeploymentError: the file cannot be opened.
    """

    def __init__(self, path: Path, block_size: int) -> None:
        try:
            # The file is unbuffered, because a buffer would keep bytes of a failed write and put them into a
            # later line.
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise DeploymentError(f"cannot write {path}: {error.strerror}", field="request_log") from None
        self.lost = 0
        self._failing = False
        self._torn = False  # whether the file ends in the middle of a line, after a failed write
        self._block = block_size
        # The first block's number is random, so that appending to an older file does not reuse its numbers.
        self._next = secrets.randbelow(_IDS)
        self._numbers: OrderedDict[bytes, int] = OrderedDict()

    def write(self, ticket: Ticket) -> None:
        """Write a finished request's lines to the request log, one per sequence; call it once per request."""
        submission, counts = ticket.submission, ticket.counts
        if submission is None or counts is None:
            return  # the request was rejected before it reached the engine
        salt = ticket.tenant.salt(submission.cache_salt).encode()
        for number, prompt in enumerate(submission.prompts):
            ids = self.block_ids(prompt, salt)
            for tokens in counts.choices[number * submission.n : (number + 1) * submission.n]:
                if tokens:
                    request = TraceRequest(
                        arrival=ticket.arrived,
                        prompt_tokens=len(prompt),
                        output_tokens=tokens,
                        max_tokens=submission.params.max_tokens,
                        hash_ids=ids,
                        hash_block=self._block,
                        tenant=ticket.tenant.name,
                        priority=ticket.tenant.priority_of(submission.priority),
                    )
                    self._append(log_line(request))

    def _append(self, line: str) -> None:
        data = f"\n{line}\n".encode() if self._torn else f"{line}\n".encode()
        try:
            # On a nearly full disk a write takes only a part of the data, and the next write raises the error.
            while data:
                data = data[self._file.write(data) :]
                self._torn = bool(data)
        except OSError as error:
            self.lost += 1
            if not self._failing:
                log.error("cannot write the request log: %s; requests are answered without it", error.strerror)
            self._failing = True
            return
        if self._failing:
            log.warning("the request log can be written again; lines lost so far: %d", self.lost)
        self._failing = False

    def block_ids(self, prompt: Sequence[int], salt: bytes) -> tuple[int, ...]:
        """Return one number for each block of tokens in `prompt`; the last block may have fewer tokens.

        A number stands for the whole prefix: all tokens from the prompt's start to the end of the block.
        """
        data = array("q", prompt).tobytes()
        size = 8 * self._block
        before, ids = hashlib.blake2b(salt, digest_size=16).digest(), []
        for at in range(0, len(data), size):
            block = before + data[at : at + size]
            before = hashlib.blake2b(block, digest_size=16).digest()
            ids.append(self._number(before))
        return tuple(ids)

    def _number(self, digest: bytes) -> int:
        number = self._numbers.get(digest)
        if number is None:
            number = self._numbers[digest] = self._next
            self._next = (self._next + 1) % _IDS
            if len(self._numbers) > _REMEMBERED:
                self._numbers.popitem(last=False)
        else:
            self._numbers.move_to_end(digest)
        return number

    def close(self) -> None:
        """Close the log file."""
        self._file.close()
