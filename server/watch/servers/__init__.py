"""The servers that can be watched: how each is recognised, what it tells, how a page of it is read.

Each file holds one ``Server``; ``servers`` has the order in which they are tried. A Tonnage server may
also speak vLLM's names (``--metrics-compat vllm``), so it comes first.
"""

from __future__ import annotations

from typing import Protocol

from tonnage.server.watch.client import Answer, Client, WatchError
from tonnage.server.watch.records import Planned, Reading, Told
from tonnage.server.watch.samples import Samples
from tonnage.server.watch.servers.llama_cpp import LlamaCppServer
from tonnage.server.watch.servers.sglang import SGLangServer
from tonnage.server.watch.servers.tonnage import TonnageServer
from tonnage.server.watch.servers.vllm import VLLMServer


class Server(Protocol):
    """Every method may raise WatchError."""

    title: str

    def answers(self, client: Client, samples: Samples) -> bool:
        """Whether the page of metrics is of such a server."""

    def silent(self, client: Client) -> str | None:
        """What to do, where such a server answers but shows no metrics."""

    def tell(self, client: Client, samples: Samples) -> Told: ...

    def read(self, client: Client, samples: Samples, page: Answer, told: Told) -> Reading: ...

    def planned(self, client: Client, samples: Samples) -> Planned | None:
        """The server's own plan, where it has one."""


def servers(kv_unified: bool | None) -> tuple[Server, ...]:
    """``kv_unified``: whether llama.cpp's slots share one cache; None: nobody says."""
    return (TonnageServer(), VLLMServer(), SGLangServer(), LlamaCppServer(kv_unified))


def recognise(client: Client, samples: Samples, known: tuple[Server, ...]) -> Server:
    """Which server the page is of. Raises WatchError for none of them, or one whose metrics are off."""
    for server in known:
        if server.answers(client, samples):
            return server
    for server in known:
        if (todo := server.silent(client)) is not None:
            raise WatchError(f"{client.url} is {server.title}, and shows no metrics", hint=todo)
    titles = ", ".join(server.title for server in known)
    raise WatchError(
        f"{client.url} is none of {titles}: its /metrics has no family of theirs",
        hint="give the URL of the server itself, not of a gateway before it",
    )
