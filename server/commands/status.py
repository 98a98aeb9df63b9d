"""``tonnage status``: the state of a Tonnage server on one screen."""

from __future__ import annotations

from tonnage.server.commands.remote import client_of, follow, seconds
from tonnage.server.parsers import status as parser

_BETWEEN = "2"


def run(argv: list[str]) -> int:
    """Show the status of a Tonnage server; return 0, or 1 when the server cannot be read.

    Raises:
        TonnageError: the input is invalid.
    """
    arguments = parser().parse_args(argv)
    again = arguments.watch or arguments.interval is not None
    interval = seconds(arguments.interval or _BETWEEN, "--interval") if again else None
    # Imported here, because --help does not need these modules.
    from tonnage.server.watch.screens import Lines, Screen, draws
    from tonnage.server.watch.status import drawn, observe, plain, to_dict

    client = client_of(arguments)
    if draws() and not arguments.json:
        return follow(lambda: observe(client), Screen(drawn, again=again), interval)
    screen = Lines(plain, to_dict if arguments.json else None, between="\n")
    return follow(lambda: observe(client), screen, interval)
