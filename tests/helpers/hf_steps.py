"""Steps of the Hugging Face engine's scheduler with tokens given by a test instead of a sampler."""

from __future__ import annotations

from collections.abc import Sequence as Values

from tonnage.server.engines.chunk import Chunk
from tonnage.server.engines.hf.scheduler import HFScheduler
from tonnage.server.engines.hf.sequence import Draw, HFSequence, draws_of


def publish_and_fork(scheduler: HFScheduler, picked: list[HFSequence]) -> list[Draw]:
    """Record a step as computed; return the draws of its sequences and of their forks."""
    draws = draws_of(picked)
    scheduler.publish(picked)
    return scheduler.fork(draws)


def finish(scheduler: HFScheduler, draws: list[Draw], tokens: Values[int]) -> list[Chunk]:
    """Append the given tokens; return the chunks."""
    for draw, token in zip(draws, tokens, strict=True):
        draw.token = token
    return scheduler.finish(draws)
