"""An `Auto` that has learned a load, without a server."""

from __future__ import annotations

from tonnage.cache.admission.auto import Auto
from tonnage.cache.admission.rehearsal import Engine

# Of a pool in which twelve requests of 32 + 200 tokens fit at their end.
ENGINE = Engine(200, 16, 512, 64)


def busy(target_itl: float | None = None) -> Auto:
    """Return an `Auto` that has seen 128 requests and steps of 17 ms + 1 ms per prefill token."""
    auto = Auto(ENGINE, target_itl, background=False)
    teach(auto)
    return auto


def teach(auto: Auto) -> None:
    """Teach ``auto`` 128 requests and steps, with a tenth of the seconds spent on recomputed tokens."""
    for number in range(128):
        prefill = 32 if number % 2 else 0
        auto.stepped(16 + prefill, 16, 2000 + 10 * number, 0.017 + 0.001 * prefill, 64)
    auto.recomputed(400)
    for number in range(128):
        auto.ended(32, 60 + 37 * number % 280, 400)
