"""Run `python -m tonnage`, which is the command `tonnage`."""

import sys

from tonnage.server.cli import main

if __name__ == "__main__":  # Spawned processes import this file and must not run the command.
    sys.exit(main())
