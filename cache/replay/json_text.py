"""A parser of the JSON in trace files, which other programs wrote."""

from __future__ import annotations

import json
from typing import Any


def parse_json(text: str) -> Any:
    """Return the value of a JSON text; report every defect of the text as ValueError.

    Raises:
        ValueError: The text is not JSON, or is nested too deeply.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None
