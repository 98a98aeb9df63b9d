"""Conversations whose pattern the demo model continues: it calls a function, or reasons, by itself."""

from __future__ import annotations

import json
from typing import Any

CITIES = ("Oslo", "Paris", "Oslo")
THOUGHTS = (("a colour", "Blue."), ("a ship", "Fram."), ("a tree", "Oak."))


def calling() -> list[dict[str, Any]]:
    """Return a chat whose earlier answers call get_weather (toolcalls.WEATHER); it asks for Paris last."""
    messages: list[dict[str, Any]] = []
    for number, city in enumerate(CITIES):
        function = {"name": "get_weather", "arguments": json.dumps({"city": city, "days": 1})}
        call = {"id": f"call_{number}", "type": "function", "function": function}
        messages += [_asked(city), {"role": "assistant", "content": None, "tool_calls": [call]}]
    return [*messages, _asked("Paris")]


def _asked(city: str) -> dict[str, Any]:
    return {"role": "user", "content": f"What is the weather in {city}?"}


def reasoning() -> list[dict[str, Any]]:
    """Return a chat whose earlier answers have reasoning in Granite's form (``--reasoning-parser granite``)."""
    messages = []
    for what, answer in THOUGHTS:
        text = f"Here is my thought process: They want {what}. Here is my response: {answer}"
        messages += [{"role": "user", "content": f"Name {what}."}, {"role": "assistant", "content": text}]
    return [*messages, {"role": "user", "content": "Name a bird."}]
