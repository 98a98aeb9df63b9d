"""``tonnage watch``: a running vLLM, SGLang, llama.cpp or Tonnage server beside the plan for it."""

from __future__ import annotations

import sys

from tonnage.planner.deployment import Deployment
from tonnage.planner.errors import DeploymentError
from tonnage.planner.flags import given
from tonnage.planner.units import parse_port
from tonnage.server.commands.remote import client_of, follow, seconds
from tonnage.server.parsers import watch as parser

_BETWEEN = "5"


def run(argv: list[str]) -> int:
    """Watch a server until the command is stopped; return 0, or 1 when the server cannot be read.

    Raises:
        TonnageError: the input is invalid.
    """
    arguments = parser().parse_args(argv)
    if arguments.once and arguments.interval is not None:
        raise DeploymentError("cannot be combined with --once", field="--interval", hint="leave one out")
    interval = None if arguments.once else seconds(arguments.interval or _BETWEEN, "--interval")
    if arguments.host is not None and arguments.port is None:
        raise DeploymentError("needs --port", field="--host")
    port = None if arguments.port is None else parse_port(arguments.port)
    if port is not None and arguments.once:
        raise DeploymentError("cannot be combined with --port", field="--once", hint="leave one out")
    # Imported here, because --help does not need these modules.
    from tonnage.server.watch.export import Exporter
    from tonnage.server.watch.screens import Lines, Screen, draws
    from tonnage.server.watch.text import drawn, lines, to_dict
    from tonnage.server.watch.watcher import Watcher

    client = client_of(arguments)
    flags = given(arguments, Deployment)
    watcher = Watcher(client, flags, arguments.model, kv_unified=flags.pop("kv_unified", None))
    exporter = None if port is None else Exporter(client.url, arguments.host or "127.0.0.1", port)
    drawing = draws() and not arguments.json
    plain = Lines(lines(), to_dict if arguments.json else None)
    screen = Screen(drawn, again=not arguments.once) if drawing else plain
    if exporter is not None:
        print(f"metrics at {exporter.address}", file=sys.stderr, flush=True)
    try:
        return follow(watcher.observe, screen, interval, exporter)
    finally:
        if exporter is not None:
            exporter.close()
