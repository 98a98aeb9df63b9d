"""Made-up loads of ten kinds for the admission matrix: lengths, prompts with real token ids, and arrivals."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from functools import cache

VOCABULARY = range(100, 49_152)
MAX_TOKENS = 600
FAMILIES, PREFIX = 4, 160  # shared prefixes: number, tokens
BURST = 16

KINDS = (
    "exponential", "lognormal", "bimodal", "equal-at-max", "equal-below-max", "regimes", "alternating",
    "bursts", "shared-prefixes", "long-prompts",
)  # fmt: skip


@dataclass(frozen=True)
class Load:
    """Requests of one kind, drawn from a seed."""

    name: str
    prompts: list[list[int]]
    """Token ids of each prompt."""
    outputs: list[int]
    """Tokens that each request generates before it ends."""
    max_tokens: int
    burst: int
    """Requests that arrive at the same time."""

    def arrivals(self, rate: float) -> list[float]:
        """Return the arrival times in seconds of Poisson bursts with `rate` requests per second."""
        draw, now, times = random.Random(f"arrivals {self.name}"), 0.0, []
        for number in range(len(self.outputs)):
            if number and number % self.burst == 0:
                now += draw.expovariate(rate / self.burst)
            times.append(now)
        return times


def _exponential(draw: random.Random, mean: float) -> int:
    return min(MAX_TOKENS, 1 + int(draw.expovariate(1 / mean)))


def _lognormal(draw: random.Random, median: float, sigma: float, most: int) -> int:
    return max(1, min(most, round(draw.lognormvariate(math.log(median), sigma))))


def _output(kind: str, number: int, count: int, draw: random.Random) -> int:
    """Return the output tokens of request `number` of `count`."""
    match kind:
        case "lognormal":  # mean 120
            return _lognormal(draw, 73, 1.0, MAX_TOKENS)
        case "bimodal":  # mean 120
            return draw.randint(500, MAX_TOKENS) if draw.random() < 0.1 else draw.randint(30, 110)
        case "equal-at-max":
            return 240
        case "equal-below-max":
            return 80
        case "regimes":  # five of them, so that lengths change both ways twice
            return _exponential(draw, 220 if number * 5 // count % 2 else 50)
        case "alternating":
            return draw.randint(250, 450) if number // 32 % 2 else draw.randint(10, 60)
        case "long-prompts":
            return min(200, 1 + int(draw.expovariate(1 / 20)))
        case _:
            return _exponential(draw, 120)


@cache
def load(kind: str, count: int, seed: int) -> Load:
    """Return `count` requests of a kind; equal arguments give equal requests."""
    name = f"{kind} {seed}"
    draw = random.Random(name)
    outputs = [_output(kind, number, count, draw) for number in range(count)]
    if kind == "long-prompts":  # at most a third of the pool of 200 blocks of 16 tokens
        sizes = [_lognormal(draw, 600, 0.5, 200 * 16 // 3) for _ in outputs]
    else:
        sizes = [_lognormal(draw, 60, 0.8, 1000) for _ in outputs]
    prompts = [draw.choices(VOCABULARY, k=size) for size in sizes]
    if kind == "shared-prefixes":
        family = random.Random(kind)  # the same prefixes for every seed: a warm cache knows them
        prefixes = [family.choices(VOCABULARY, k=PREFIX) for _ in range(FAMILIES)]
        prompts = [draw.choice(prefixes) + prompt for prompt in prompts]
    at_max = kind == "equal-at-max"
    return Load(name, prompts, outputs, 240 if at_max else MAX_TOKENS, BURST if kind == "bursts" else 1)
