"""The request log: what was asked for and how long the answers were, for ``tonnage replay``. No text.

Prompts appear as numbers of their blocks: equal numbers mean equal beginnings of the same tenant and salt. A
number says when a block was first seen and nothing of its tokens.
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

_IDS = 2**30  # trace readers take whole numbers below (cache/replay/trace.py)
_REMEMBERED = 2**20  # blocks; about 150 MiB at the most. One that was forgotten gets a new number.


class RequestLog:
    """Appends to ``path``, a line for each sequence that produced tokens.

    ``block_size``: tokens of a hashed block. Raises DeploymentError when the file cannot be opened. What cannot
    be written later, as on a full disk, is ``lost`` (lines) and said in the log: no answer depends on it.
    """

    def __init__(self, path: Path, block_size: int) -> None:
        try:
            # Unbuffered: a buffer would keep what was refused, and write it into a later line.
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise DeploymentError(f"cannot write {path}: {error.strerror}", field="request_log") from None
        self.lost = 0
        self._failing = False
        self._torn = False  # the file ends in the middle of a line
        self._block = block_size
        # A server that appends to an older file must not give its numbers new meanings.
        self._next = secrets.randbelow(_IDS)
        self._numbers: OrderedDict[bytes, int] = OrderedDict()

    def write(self, ticket: Ticket) -> None:
        """To be called once for each request, when it has its outcome."""
        submission, counts = ticket.submission, ticket.counts
        if submission is None or counts is None:
            return  # refused before it went to the engine
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
            while data:  # the last bytes of a disk take a part; why there are no more, the next call says
                data = data[self._file.write(data) :]
                self._torn = bool(data)
        except OSError as error:
            self.lost += 1
            if not self._failing:
                log.error("cannot write the request log: %s; requests are answered without it", error.strerror)
            self._failing = True
            return
        if self._failing:
            log.warning("the request log is written again; lines lost so far: %d", self.lost)
        self._failing = False

    def block_ids(self, prompt: Sequence[int], salt: bytes) -> tuple[int, ...]:
        """A number for each block of ``prompt`` (the last may be partly filled), of all tokens to its end."""
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
        self._file.close()
