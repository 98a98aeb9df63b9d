"""Reading of llama.cpp's llama-server (tools/server/server-context.cpp of llama-cpp-python 0.3.36's sources).

``/metrics`` has counters, ``/slots`` the tokens of each slot, ``/props`` and ``/v1/models`` the model. The
server does not report whether the slots share one KV cache. They share one with ``-kvu``, and by default if
``-np`` is not given.
"""

from __future__ import annotations

from typing import Any

from tonnage.server.engines.stats import added
from tonnage.server.watch.client import Client, Response
from tonnage.server.watch.records import Counters, PlanSummary, Pool, Reading, Replica, ServerFacts
from tonnage.server.watch.samples import Samples
from tonnage.server.watch.servers.json_values import cards, mapping, number, objects, text


class LlamaCppServer:
    """A reader of a llama-server's metrics and settings over HTTP.

    `kv_unified` says whether its slots share one KV cache; None means that this is not known.
    """

    title = "llama.cpp"

    def __init__(self, kv_unified: bool | None) -> None:
        self._unified = kv_unified

    def matches(self, client: Client, samples: Samples) -> bool:
        """Return whether the metrics page belongs to llama-server."""
        return samples.has_prefix("llamacpp:")

    def metrics_hint(self, client: Client) -> str | None:
        """Return how to turn on the metrics of a llama-server, or None for a server of another kind."""
        props = mapping(client.get("/props").json())
        return "start it with --metrics" if "total_slots" in props else None

    def planned(self, client: Client, samples: Samples) -> PlanSummary | None:
        """Return None, because a llama-server reports no plan of its own."""
        return None

    def facts(self, client: Client, samples: Samples) -> ServerFacts:
        """Return the model, context and slots of a llama-server."""
        props = mapping(client.get("/props").json())
        card = next(iter(cards(client.get("/v1/models").json())), {})
        slots = number(props.get("total_slots")) or 1
        # n_ctx is the context length of one slot, in tokens.
        context = number(mapping(props.get("default_generation_settings")).get("n_ctx"))
        unified = self._shares(slots)
        flags: dict[str, Any] = {} if context is None else {"max_model_len": context}
        # Slots that share one context are planned as one sequence with that context.
        flags["max_num_seqs"] = 1 if unified else slots
        size = number(mapping(card.get("meta")).get("size"))
        notes = []
        if unified is None:
            notes.append(
                f"llama.cpp does not report whether its {slots} slots share one KV cache: give --kv-unified if "
                "it was started without -np or with -kvu, else --no-kv-unified"
            )
        return ServerFacts(
            title=self.title,
            version=text(props.get("build_info")),
            served=text(props.get("model_alias")) or text(card.get("id")),
            model=text(props.get("model_path")),
            flags=flags,
            measured={} if not size else {"weights": size},
            hidden=("kv_pool",) if unified is None else (),
            notes=tuple(notes),
        )

    def read(self, client: Client, samples: Samples, page: Response, facts: ServerFacts) -> Reading:
        """Return the running requests, slots and counters of a llama-server now."""
        # With --no-slots the server answers GET /slots with 501. Only its counters are known then.
        slots = objects(client.get("/slots").json())
        replicas, typical = self._slots(samples, slots)
        computed = samples.count("llamacpp:prompt_tokens_total")
        cached = samples.count("llamacpp:prompt_tokens_cached_total")
        return Reading(
            replicas=replicas,
            counters=Counters(
                prompt_tokens=computed,
                generation_tokens=samples.count("llamacpp:tokens_predicted_total"),
                prefix_query_tokens=added((computed, cached)),
                prefix_hit_tokens=cached,
            ),
            measured=facts.measured,
            started=page.start,
            typical=typical,
        )

    def _shares(self, slots: int) -> bool | None:
        return self._unified if slots > 1 else True

    def _slots(
        self, samples: Samples, slots: list[Any]
    ) -> tuple[tuple[Replica, ...], tuple[float, float] | None]:
        """Return a llama-server's slots as replicas, and the average number of tokens of a slot in use.

        Slots that share one KV cache form one replica; otherwise each slot is a replica.
        """
        running, waiting = (
            samples.count("llamacpp:requests_processing"), samples.count("llamacpp:requests_deferred")
        )  # fmt: skip
        # tokens of prompt and output so far, for each slot
        held = [number(slot.get("n_prompt_tokens")) or 0 for slot in slots]
        busy = [slot.get("is_processing") is True for slot in slots]
        used = [tokens for tokens in held if tokens]
        typical = (sum(used) / len(used), 1.0) if used else None
        unified, context = self._shares(len(slots)), number(slots[0].get("n_ctx")) if slots else None
        if unified is None or not context:
            return (Replica(running, waiting, seats=len(slots) or None),), typical
        pairs = list(zip(held, busy, strict=True))
        if unified:
            return (Replica(running, waiting, _pool(context, pairs), len(slots)),), typical
        # A waiting request may get any slot, so all waiting requests are counted with the first replica.
        parts = [Replica(int(one[1]), 0, _pool(context, [one]), 1) for one in pairs]
        parts[0] = Replica(parts[0].running, waiting, parts[0].pool, 1)
        return tuple(parts), typical


def _pool(cells: int, slots: list[tuple[int, bool]]) -> Pool:
    used = min(cells, sum(tokens for tokens, busy in slots if busy))
    cached = min(cells - used, sum(tokens for tokens, busy in slots if not busy))
    return Pool(num_blocks=cells, usable=cells, block_size=1, used=used, cached=cached)
