"""The request log for `tonnage replay`: the size of each request and output, without text.

A prompt is logged as one number per block. Equal numbers mean equal prefixes with the same tenant and salt. A
number depends only on when its block was first seen, so it reveals nothing of its tokens.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from tonnage.cache.replay.trace import TraceRequest, log_line
from tonnage.planner.errors import DeploymentError
from tonnage.server.requests.accounts import Ticket

log = logging.getLogger("tonnage.server")

_IDS = 2**30  # trace readers accept integers below this (cache/replay/trace.py)
_REMEMBERED = 2**20  # blocks, at most about 150 MiB. A forgotten block gets a new number.


class RequestLog:
    """A log file with one line for each sequence that produced tokens.

    A line that cannot be written, as on a full disk, is counted in `lost` and logged. Requests are answered all
    the same.

    Args:
        path: the file to append to.
        block_size: tokens of a hashed block.

    Raises:
        DeploymentError: the file cannot be opened.
    """

    def __init__(self, path: Path, block_size: int) -> None:
        try:
            # Unbuffered: a buffer would keep bytes of a failed write and put them into a later line.
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise DeploymentError(f"cannot write {path}: {error.strerror}", field="request_log") from None
        self.lost = 0
        self._failing = False
        self._torn = False  # the file ends in the middle of a line
        self._block = block_size
        # The first number is random, so that appending to an older file does not reuse its numbers.
        self._next = secrets.randbelow(_IDS)
        self._numbers: OrderedDict[bytes, int] = OrderedDict()

    def write(self, ticket: Ticket) -> None:
        """Write the lines of a finished request; call it once for each request."""
        submission, counts = ticket.submission, ticket.counts
        if submission is None or counts is None:
            return  # rejected before it reached the engine
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
            while data:  # a nearly full disk takes only a part, and the next call raises the error
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
        """Return one number for each block of `prompt`; the last block may be partial.

        A number stands for all tokens up to the end of its block.
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
        """Close the file."""
        self._file.close()
