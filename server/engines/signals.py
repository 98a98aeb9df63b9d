"""What becomes of a terminal's signals in the processes of an engine."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interrupt_held() -> Iterator[None]:
    """A process started meanwhile by this thread begins with SIGINT held back: a terminal sends Ctrl-C to all
    processes, and until one says otherwise Python answers it with a traceback. Ending them is the server's."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
