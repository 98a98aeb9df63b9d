"""Entry point of the engine process: ``python -m tonnage.server.engines.hf FD THREADS``."""

from __future__ import annotations

import os
import signal
import sys

if __name__ == "__main__":
    # The parent handles Ctrl-C. It starts this process with the signal blocked, so that Ctrl-C during an import
    # below prints no traceback.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT,))
    from tonnage.server.engines.imports import no_collections

    with no_collections():
        from tonnage.server.engines.hf.child import main
    main(int(sys.argv[1]), int(sys.argv[2]))
    # The kernel reclaims the rest. The interpreter would first free torch and its own heap object by object,
    # 1.7 s of processor time that delay the stop of a server.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
