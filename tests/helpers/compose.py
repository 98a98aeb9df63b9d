"""Variables in a compose file, filled in as Compose does."""

from __future__ import annotations

import re
from collections.abc import Mapping

# ${NAME}, ${NAME:-default}, ${NAME:+where it is set}, ${NAME:?what is missing}; without one inside.
_VARIABLE = re.compile(r"\$\{(\w+)(?::([-+?])([^${}]*))?\}")


def filled(text: str, variables: Mapping[str, str]) -> str:
    """From the inside out. Raises AssertionError where one is missing that has to be there."""

    def value(found: re.Match[str]) -> str:
        name, kind, rest = found.groups()
        given = variables.get(name, "")
        if kind == "?":
            assert given, rest
        if kind == "+":
            return str(rest) if given else ""
        return given or (str(rest) if kind == "-" else "")

    while _VARIABLE.search(text):
        text = _VARIABLE.sub(value, text)
    return text
