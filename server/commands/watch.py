"""``tonnage watch``: a running vLLM, SGLang, llama.cpp or Tonnage server beside its plan."""

from __future__ import annotations

import argparse
import sys

from tonnage.planner.errors import DeploymentError
from tonnage.planner.flags import flags_of, given
from tonnage.planner.headers.hub import add_token_flag
from tonnage.planner.plans import Deployment
from tonnage.server.commands.launch import Parser, stoppable
from tonnage.server.commands.remote import add_client_flags, client_of, seconds

OK, FAILED = 0, 1

_EPILOG = """
The server is recognised by its /metrics; llama-server shows them with --metrics, SGLang with
--enable-metrics. Its plan is made from what it tells of itself and from the flags given here, which are those
of tonnage plan. A flag that contradicts the server is refused; a figure that does not follow from what is known
is left out.

exit codes: 0 done (or stopped), 1 the server cannot be read, 2 bad input. With --port, and after its first
look, a watch goes on when the server does not answer.

examples:
  tonnage watch http://localhost:8000 --gpu h100-80g
  tonnage watch http://localhost:30000 --gpu h200-141g --once --json
  tonnage watch http://localhost:8080 --model ./model.gguf --no-kv-unified
  tonnage watch http://vllm:8000 --model ./Llama-3.1-8B --gpu l40s-48g --port 9401 --host 0.0.0.0
"""

# The engine is recognised; what it drafts with and offloads is said as in tonnage plan.
_RECOGNISED = ("engine",)


def parser() -> argparse.ArgumentParser:
    p = Parser(
        prog="tonnage watch",
        description="Show what a running server holds beside what its plan says: memory, KV use, headroom, "
        "requests, preemptions.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    p.add_argument("url", metavar="URL", help="of the server, for example http://localhost:8000")
    p.add_argument(
        "--model", metavar="MODEL", help="what it loaded: a folder with config.json, a .gguf file or a hub id "
        "(default: as the server names it)",
    )  # fmt: skip
    add_token_flag(p)
    p.add_argument("--once", action="store_true", help="look once")
    p.add_argument(
        "--interval", default="5", metavar="SECONDS", help="between the begins of two looks (default: 5)"
    )
    p.add_argument("--json", action="store_true", help="print one JSON object a look, one a line")
    p.add_argument("--port", metavar="N", help="also serve the looks to Prometheus, at /metrics on this port")
    p.add_argument("--host", metavar="HOST", help="address of --port (default: 127.0.0.1)")
    add_client_flags(p)
    p.add_argument(
        "--kv-unified",
        action=argparse.BooleanOptionalAction,
        help="llama.cpp: whether its slots share one KV cache (started without -np, or with -kvu)",
    )
    planned = p.add_argument_group("the plan, where the server does not tell")
    for name, flag in flags_of(Deployment).items():
        if name not in _RECOGNISED:
            flag.add_to(planned)
    return p


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
    watcher = Watcher(client, given(arguments, Deployment), arguments.model, kv_unified=arguments.kv_unified)
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
        print(f"tonnage watch: {error}", file=sys.stderr)
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
