"""The kinds of servers that can be watched: how each is recognised, and how its facts and state are read.

Each module has one implementation of `Server`, and `servers` lists them in the order in which they are tried.
Tonnage comes before vLLM, because a Tonnage server may also use vLLM's metric names (`--metrics-compat vllm`).
"""

from __future__ import annotations

from typing import Protocol

from tonnage.server.watch.client import Client, Response, WatchError
from tonnage.server.watch.records import PlanSummary, Reading, ServerFacts
from tonnage.server.watch.samples import Samples
from tonnage.server.watch.servers.llama_cpp import LlamaCppServer
from tonnage.server.watch.servers.sglang import SGLangServer
from tonnage.server.watch.servers.tonnage import TonnageServer
from tonnage.server.watch.servers.vllm import VLLMServer


class Server(Protocol):
    """Interface of a reader for one kind of server, such as vLLM; every method may raise WatchError."""

    title: str

    def matches(self, client: Client, samples: Samples) -> bool:
        """Return whether the metrics page belongs to this kind of server."""

    def metrics_hint(self, client: Client) -> str | None:
        """Return how to turn on the metrics of a server of this kind, or None for a server of another kind."""

    def facts(self, client: Client, samples: Samples) -> ServerFacts:
        """Return the version, model and flags of the server, which stay the same until it restarts."""

    def read(self, client: Client, samples: Samples, page: Response, facts: ServerFacts) -> Reading:
        """Return the server's running requests, KV pool and counters at this moment."""

    def planned(self, client: Client, samples: Samples) -> PlanSummary | None:
        """Return the plan that the server itself reports, or None when it reports no plan."""


def servers(kv_unified: bool | None) -> tuple[Server, ...]:
    """Return a reader for each kind of server.

    `kv_unified` says whether llama.cpp's slots share one KV cache; None means that this is not known.
    """
    return (TonnageServer(), VLLMServer(), SGLangServer(), LlamaCppServer(kv_unified))


def recognise(client: Client, samples: Samples, known: tuple[Server, ...]) -> Server:
    """Return the reader for the kind of server that the metrics page belongs to.

    Raises:
        WatchError: the server is of no known kind, or its metrics are off.
    """
    for server in known:
        if server.matches(client, samples):
            return server
    for server in known:
        if (todo := server.metrics_hint(client)) is not None:
            raise WatchError(f"{client.url} is {server.title}, but its metrics are off", hint=todo)
    titles = ", ".join(server.title for server in known)
    raise WatchError(
        f"{client.url} is none of {titles}: its /metrics has none of their metrics",
        hint="give the URL of the server itself, not of a gateway in front of it",
    )
