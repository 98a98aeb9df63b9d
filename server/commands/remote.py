"""Functions that the commands for a running server share: its client, and the loop that shows its state."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from tonnage.planner.arguments import refused
from tonnage.planner.errors import DeploymentError
from tonnage.server.commands.stopping import stoppable

if TYPE_CHECKING:
    from tonnage.server.watch.client import Client
    from tonnage.server.watch.loop import AnyObservation, Output
    from tonnage.server.watch.screens import Lines, Screen

OK, FAILED = 0, 1
_LEAST, _MOST = 0.1, 86_400.0


def client_of(arguments: argparse.Namespace) -> Client:
    """Return an HTTP client for the server that the command line names.

    The API key is that of --api-key, or else the first key in TONNAGE_API_KEY.

    Raises:
        DeploymentError: the URL, the key or the timeout is invalid.
    """
    from tonnage.server.watch.client import Client  # imported here, because --help does not need it

    timeout = seconds(arguments.timeout, "--timeout")
    key = arguments.api_key or os.environ.get("TONNAGE_API_KEY", "").split(",")[0].strip() or None
    return Client(arguments.url, api_key=key, timeout=timeout)


def follow(
    observe: Callable[[], AnyObservation],
    screen: Lines[AnyObservation] | Screen[AnyObservation],
    interval: float | None,
    beside: Output[AnyObservation] | None = None,
) -> int:
    """Show observations of a server until Ctrl-C or SIGTERM; return 0, or 1 when the server cannot be read.

    Args:
        observe: makes one observation of the server and returns it.
        screen: the output on stdout: lines of text or a terminal screen.
        interval: seconds between two observations, None for a single one.
        beside: a second output, such as an exporter, or None. With a second output the loop also waits for a
            server that does not answer yet.
    """
    from tonnage.server.watch.client import WatchError  # imported here, because --help does not need it
    from tonnage.server.watch.loop import watch

    outputs = [screen] if beside is None else [screen, beside]
    try:
        with stoppable(), screen:
            watch(observe, outputs, interval, patient=beside is not None)
        return OK
    except WatchError as error:
        refused(error)
        return FAILED
    except (KeyboardInterrupt, SystemExit):  # Ctrl-C and SIGTERM are the normal end of the command
        return OK


def seconds(text: str, field: str) -> float:
    """Return a command-line argument as a number of seconds; `field` names the option in errors.

    Raises:
        DeploymentError: the text is not a number between 0.1 and 86,400.
    """
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not _LEAST <= value <= _MOST:
        raise DeploymentError(f"{text[:40]!r} is not between {_LEAST} and {_MOST:,.0f} seconds", field=field)
    return value
