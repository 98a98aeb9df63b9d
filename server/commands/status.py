"""``tonnage status``: a Tonnage server at a glance."""

from __future__ import annotations

import argparse
import sys

from tonnage.server.commands.launch import Parser, stoppable
from tonnage.server.commands.remote import add_client_flags, client_of, seconds

OK, FAILED = 0, 1

# Settings.host and port, as tonnage serve has them.
_HERE = "http://127.0.0.1:8000"

_EPILOG = """
Asks the server's /memory: its model, since when it is ready, planned against measured bytes, the KV pool by
state, running and waiting requests with the oldest of each, how much more fits, how long a stop would take. The
page at / of the server shows the same; tonnage watch shows other servers, and rates.

exit codes: 0 done (or stopped), 1 the server cannot be read, 2 bad input. With --watch, and after its first
look, it goes on when the server does not answer.

examples:
  tonnage status
  tonnage status gpu-7:8000 --watch
  tonnage status https://llm.example.com --api-key KEY --json
"""


def parser() -> argparse.ArgumentParser:
    p = Parser(
        prog="tonnage status",
        description="Show what a Tonnage server holds, whom it serves and how much more fits.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    p.add_argument("url", nargs="?", default=_HERE, metavar="URL", help=f"of the server (default: {_HERE})")
    p.add_argument("--watch", action="store_true", help="look again and again")
    p.add_argument("--interval", default="2", metavar="SECONDS", help="between two looks (default: 2)")
    p.add_argument("--json", action="store_true", help="print one JSON object a look: /memory, with the URL")
    add_client_flags(p)
    return p


def run(argv: list[str]) -> int:
    """Returns 0, or 1 where the server cannot be read; raises TonnageError on bad input."""
    arguments = parser().parse_args(argv)
    interval = seconds(arguments.interval, "--interval") if arguments.watch else None
    # Imported here: --help needs none of it.
    from tonnage.server.watch.client import WatchError
    from tonnage.server.watch.loop import watch
    from tonnage.server.watch.screens import Lines, Screen
    from tonnage.server.watch.status import drawn, look, plain, to_dict

    client = client_of(arguments)
    piped = arguments.json or not sys.stdout.isatty()
    screen = Lines(plain, to_dict if arguments.json else None) if piped else Screen(drawn)
    try:
        with stoppable(), screen:
            watch(lambda: look(client), [screen], interval)
            return OK
    except WatchError as error:
        print(f"tonnage status: {error}", file=sys.stderr)
        return FAILED
    except (KeyboardInterrupt, SystemExit):  # how a watch ends
        return OK
