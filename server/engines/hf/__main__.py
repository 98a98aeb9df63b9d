"""Entry point of the Hugging Face engine's process: ``python -m tonnage.server.engines.hf FD THREADS``."""

from __future__ import annotations

import os
import signal
import sys

if __name__ == "__main__":
    # The parent process handles Ctrl-C and starts this process with SIGINT blocked. So Ctrl-C during an import
    # below prints no traceback.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT,))
    from tonnage.server.engines.imports import no_collections

    with no_collections():
        from tonnage.server.engines.hf.child import main
    main(int(sys.argv[1]), int(sys.argv[2]))
    # Exit without freeing memory: the kernel reclaims it. Freeing torch and the interpreter's heap object by
    # object takes 1.7 s of processor time and delays the stop of a server.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
