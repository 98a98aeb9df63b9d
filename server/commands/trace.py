"""The request trace that a command's arguments name."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from tonnage.planner.units import parse_count

if TYPE_CHECKING:
    from tonnage.cache.replay.trace import Trace


def trace_of(arguments: argparse.Namespace, *, skip_bad_lines: bool = False) -> Trace:
    """Read the trace that the argument `trace` names, with the options --limit and --columns.

    Raises:
        TonnageError: an option or the trace is invalid.
    """
    # imported here, because --help does not need these modules
    from tonnage.cache.replay.columns import parse_columns
    from tonnage.cache.replay.trace import read_trace

    limit = positive(arguments.limit, "--limit")
    columns = None if arguments.columns is None else parse_columns(arguments.columns)
    return read_trace(Path(arguments.trace), limit=limit, skip_bad_lines=skip_bad_lines, columns=columns)


def positive(text: str | None, field: str) -> int | None:
    """Return a command-line argument as an integer of at least one, or None if it is absent.

    Raises:
        DeploymentError: the text is no integer of at least one; the error names `field`.
    """
    return None if text is None else parse_count(text, field)
