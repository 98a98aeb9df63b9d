"""``python -m tonnage``: the command ``tonnage``."""

import sys

from tonnage.server.cli import main

if __name__ == "__main__":  # a process that multiprocessing spawns reads this file under another name
    sys.exit(main())
