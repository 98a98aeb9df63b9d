"""Pacing of received bytes, so that large heads and bodies do not delay the streams that are running.

The event loop reads in one round from every connection that has received bytes. The bytes of a read take up to
some milliseconds to parse. Without pacing, 48 clients that sent heads of 64 KB, or 16 heads at once, delayed
/health by 140 to 190 ms (benchmarks/abuse.py fields and pipeline).
"""

from __future__ import annotations

import time
from asyncio import AbstractEventLoop
from collections import deque
from typing import Protocol
from weakref import WeakKeyDictionary

# Received data of at most this many bytes is parsed immediately, without pacing. The head of a health probe by
# Kubernetes has about 110 bytes: the request line, Host, User-Agent, Accept and Connection
# (pkg/probe/http/request.go).
UNPACED_BYTES = 512
# Seconds for which waiting bytes are parsed in one round of the event loop. Clients do not notice such a delay.
# The requests that start in one round take as long again (pacing.py).
ROUND_SECONDS = 0.005


class Receiver(Protocol):
    """Interface of a connection whose received bytes may wait to be parsed."""

    def parse_next(self) -> None:
        """Parse the oldest received bytes of this connection that wait to be parsed."""


class ReceivePacing:
    """Queue of a server's connections with received bytes to parse, in the order in which the bytes arrived."""

    def __init__(self, loop: AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: deque[Receiver] = deque()

    def add(self, connection: Receiver) -> None:
        """Queue one more piece of received bytes, which ``connection`` keeps, for parsing."""
        if not self._waiting:
            self._loop.call_soon(self._parse_some)
        self._waiting.append(connection)

    def _parse_some(self) -> None:
        until = time.monotonic() + ROUND_SECONDS
        while self._waiting:
            self._waiting.popleft().parse_next()
            if time.monotonic() > until and self._waiting:
                self._loop.call_soon(self._parse_some)
                return


_pacing: WeakKeyDictionary[object, ReceivePacing] = WeakKeyDictionary()


def pacing_of(server: object, loop: AbstractEventLoop) -> ReceivePacing:
    """Return the `ReceivePacing` of a server; ``server`` is uvicorn's state object, one for each server."""
    return _pacing.setdefault(server, ReceivePacing(loop))
