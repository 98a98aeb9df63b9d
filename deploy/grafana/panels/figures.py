"""Figures that stand on several dashboards: the same query, colours and words on each; a dashboard gives
``width`` and ``more`` of ``panels.parts.number``."""

from __future__ import annotations

from functools import partial

from panels.parts import DRIFT, DRIFT_STEPS, ONE, QUEUE, ROOM, number, reads

ready = partial(
    number,
    "Can it serve",
    "tonnage_engine_ready of the worst server: no while one loads or is dead; GET /ready there says why.",
    "short",
    f"min(tonnage_engine_ready{{{ONE}}})",
    steps=((None, "red"), (1, "green")),
    mappings=(reads(_0=("no", "red"), _1=("yes", "green")),),
)
waiting = partial(
    number,
    "Waiting",
    'tonnage_engine_requests{state="waiting"}: requests in all queues; autoscaling watches it.',
    "short",
    f'sum(tonnage_engine_requests{{{ONE}, state="waiting"}})',
    steps=QUEUE,
    mappings=(reads(_0=("nobody", "green")),),
)
room = partial(
    number,
    "Room for more requests",
    "tonnage_headroom_requests of the fullest server: more requests of the present mix that fit now. At "
    "0 new ones wait: add a replica, or lower max_tokens of the callers.",
    "short",
    f"min(tonnage_headroom_requests{{{ONE}}})",
    steps=ROOM,
    mappings=(reads(_0=("none", "red")),),
)
drift = partial(
    number,
    "Plan drift",
    "How far measured memory is off its plan at worst (tonnage_memory_measured_to_planned_ratio): "
    "weights and pool in either direction, the process above it. From 3 % on an alert fires: run tonnage "
    "verify.",
    "percentunit",
    f"max({DRIFT})",
    steps=DRIFT_STEPS,
    mappings=(reads(_0=("none", "green")),),
)
