"""Run ``tonnage`` after the Python code in the first argument: ``after.py CODE serve ...``."""

from __future__ import annotations

import sys

from tonnage.server.cli import main

if __name__ == "__main__":  # vLLM's processes read this file too
    exec(sys.argv.pop(1))
    sys.exit(main(sys.argv[1:]))
