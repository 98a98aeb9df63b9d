"""``tonnage watch``: a running vLLM, SGLang, llama.cpp or Tonnage server beside its plan."""

from __future__ import annotations

import sys

from tonnage.planner.deployment import Deployment
from tonnage.planner.errors import DeploymentError
from tonnage.planner.flags import given
from tonnage.server.commands.remote import client_of, seconds
from tonnage.server.commands.stopping import stoppable
from tonnage.server.parsers import watch as parser

OK, FAILED = 0, 1


def run(argv: list[str]) -> int:
    """Returns 0, or 1 where the server cannot be read; raises TonnageError on bad input."""
    arguments = parser().parse_args(argv)
    interval = seconds(arguments.interval, "--interval")
    if arguments.host is not None and arguments.port is None:
        raise DeploymentError("means nothing without --port", field="--host")
    port = _port(arguments.port)
    if port is not None and arguments.once:
        raise DeploymentError("ends after one look, --port goes on", field="--once", hint="leave one out")
    # Imported here: --help needs none of it.
    from tonnage.server.watch.client import WatchError
    from tonnage.server.watch.export import Exporter
    from tonnage.server.watch.loop import watch
    from tonnage.server.watch.screens import Lines, Screen
    from tonnage.server.watch.text import drawn, lines, to_dict
    from tonnage.server.watch.watcher import Watcher

    client = client_of(arguments)
    flags = given(arguments, Deployment)
    watcher = Watcher(client, flags, arguments.model, kv_unified=flags.pop("kv_unified", None))
    exporter = None if port is None else Exporter(client.url, arguments.host or "127.0.0.1", port)
    plain = arguments.json or not sys.stdout.isatty()
    screen = Lines(lines(), to_dict if arguments.json else None) if plain else Screen(drawn)
    if exporter is not None:
        print(f"metrics at {exporter.address}", file=sys.stderr, flush=True)
    try:
        with stoppable(), screen:
            places = [screen] if exporter is None else [screen, exporter]
            watch(watcher.look, places, None if arguments.once else interval, patient=exporter is not None)
            return OK
    except WatchError as error:
        print(f"tonnage: {error}", file=sys.stderr)
        return FAILED
    except (KeyboardInterrupt, SystemExit):  # how a watch ends
        return OK
    finally:
        if exporter is not None:
            exporter.close()


def _port(text: str | None) -> int | None:
    if text is None:
        return None
    if not text.isdecimal() or not text.isascii() or len(text) > 5 or int(text) > 65_535:
        raise DeploymentError(f"{text[:40]!r} is no port", field="--port", hint="from 0 (a free one) to 65535")
    return int(text)
