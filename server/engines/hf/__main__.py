"""The engine process, from its first import to its end: ``python -m tonnage.server.engines.hf FD THREADS``."""

from __future__ import annotations

import os
import signal
import sys

if __name__ == "__main__":
    # Ctrl-C is the parent's to handle. It started us with the signal held back, so that no import below ends in
    # a traceback.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT,))
    from tonnage.server.engines.imports import no_collections

    with no_collections():
        from tonnage.server.engines.hf.child import main
    main(int(sys.argv[1]), int(sys.argv[2]))
    # What is left the kernel takes back. The interpreter would first take torch and its own heap apart, object
    # by object: 1.7 s of processor time for which whoever stops a server waits.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
