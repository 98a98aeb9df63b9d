"""What the commands that ask a running server have in common: its key, how long they wait, how they end."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from tonnage.planner.errors import DeploymentError
from tonnage.server.commands.stopping import stoppable

if TYPE_CHECKING:
    from tonnage.server.watch.client import Client
    from tonnage.server.watch.loop import Look, Shows
    from tonnage.server.watch.screens import Lines, Screen

OK, FAILED = 0, 1
_LEAST, _MOST = 0.1, 86_400.0


def client_of(arguments: argparse.Namespace) -> Client:
    """Raises DeploymentError for what is no URL, no key, no time. The environment of a server may hold several
    keys: the first one is sent."""
    from tonnage.server.watch.client import Client  # --help needs none of it

    timeout = seconds(arguments.timeout, "--timeout")
    key = arguments.api_key or os.environ.get("TONNAGE_API_KEY", "").split(",")[0].strip() or None
    return Client(arguments.url, api_key=key, timeout=timeout)


def follow(
    look: Callable[[], Look], screen: Lines[Look] | Screen[Look], interval: float | None,
    beside: Shows[Look] | None = None,
) -> int:  # fmt: skip
    """Show looks on ``screen`` until Ctrl-C or SIGTERM, one where ``interval`` is None. ``beside``: another
    place, which waits for a server that does not answer yet. Returns 0, or 1 where it cannot be read."""
    from tonnage.server.watch.client import WatchError  # --help needs none of it
    from tonnage.server.watch.loop import watch

    places = [screen] if beside is None else [screen, beside]
    try:
        with stoppable(), screen:
            watch(look, places, interval, patient=beside is not None)
        return OK
    except WatchError as error:
        print(f"tonnage: {error}", file=sys.stderr)
        return FAILED
    except (KeyboardInterrupt, SystemExit):  # how a watch ends
        return OK


def seconds(text: str, field: str) -> float:
    """Raises DeploymentError for what is not from a tenth of a second to a day."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not _LEAST <= value <= _MOST:
        raise DeploymentError(f"{text[:40]!r} is not from {_LEAST} to {_MOST:,.0f} seconds", field=field)
    return value
