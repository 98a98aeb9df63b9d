"""Signal handling while engine processes are started."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interrupt_held() -> Iterator[None]:
    """Block SIGINT in this thread while the context is open; processes started in it inherit the block.

    A terminal sends Ctrl-C to all its processes, and Python's default handler prints a traceback. The server
    process ends its engine processes itself.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
