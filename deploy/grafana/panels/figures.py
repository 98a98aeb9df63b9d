"""Panels that appear on several dashboards with the same query, colours and words.

A dashboard passes ``width`` and ``more`` of ``panels.parts.number``.
"""

from __future__ import annotations

from functools import partial

from panels.parts import DRIFT, DRIFT_STEPS, ONE, QUEUE, ROOM, number, reads

ready = partial(
    number,
    "Ready to serve",
    "tonnage_engine_ready of the worst server: no while a server loads or is dead. GET /ready returns the "
    "reason.",
    "short",
    f"min(tonnage_engine_ready{{{ONE}}})",
    steps=((None, "red"), (1, "green")),
    mappings=(reads(_0=("no", "red"), _1=("yes", "green")),),
)
waiting = partial(
    number,
    "Waiting",
    'tonnage_engine_requests{state="waiting"}: requests in all queues. Autoscaling uses it.',
    "short",
    f'sum(tonnage_engine_requests{{{ONE}, state="waiting"}})',
    steps=QUEUE,
    mappings=(reads(_0=("none", "green")),),
)
room = partial(
    number,
    "Room for more requests",
    "tonnage_headroom_requests of the fullest server: further requests of the current mix that fit now. At "
    "0, new requests wait: add a replica, or let clients lower max_tokens.",
    "short",
    f"min(tonnage_headroom_requests{{{ONE}}})",
    steps=ROOM,
    mappings=(reads(_0=("none", "red")),),
)
drift = partial(
    number,
    "Plan drift",
    "Largest deviation of measured memory from the plan (tonnage_memory_measured_to_planned_ratio): "
    "weights and pool in both directions, the process only above. From 3 % on an alert fires: run tonnage "
    "verify.",
    "percentunit",
    f"max({DRIFT})",
    steps=DRIFT_STEPS,
    mappings=(reads(_0=("none", "green")),),
)
