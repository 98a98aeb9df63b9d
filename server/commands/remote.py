"""What the commands that ask a running server have in common: its key, and how long they wait."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from tonnage.planner.errors import DeploymentError

if TYPE_CHECKING:
    from tonnage.server.watch.client import Client

_LEAST, _MOST = 0.1, 86_400.0


def client_of(arguments: argparse.Namespace) -> Client:
    """Raises DeploymentError for what is no URL, no key, no time. The environment of a server may hold several
    keys: the first one is sent."""
    from tonnage.server.watch.client import Client  # --help needs none of it

    timeout = seconds(arguments.timeout, "--timeout")
    key = arguments.api_key or os.environ.get("TONNAGE_API_KEY", "").split(",")[0].strip() or None
    return Client(arguments.url, api_key=key, timeout=timeout)


def seconds(text: str, field: str) -> float:
    """Raises DeploymentError for what is not from a tenth of a second to a day."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not _LEAST <= value <= _MOST:
        raise DeploymentError(f"{text[:40]!r} is not from {_LEAST} to {_MOST:,.0f} seconds", field=field)
    return value
