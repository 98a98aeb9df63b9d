"""Run `python -m tonnage`, which is the command `tonnage`."""

import sys

from tonnage.server.cli import main

if __name__ == "__main__":  # multiprocessing's spawn imports this file under another name
    sys.exit(main())
