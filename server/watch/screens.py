"""Where looks are shown: lines, or one screen of a terminal."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from tonnage.planner.bars import shades
from tonnage.server.watch.client import WatchError

Look = TypeVar("Look")


class Lines(Generic[Look]):
    """Plain lines, or JSON: one object a look, one a line."""

    def __init__(self, plain: Callable[[Look], str], to_dict: Callable[[Look], dict[str, Any]] | None) -> None:
        """``to_dict`` None: no JSON. ``plain``: the lines of a look."""
        self._plain, self._to_dict = plain, to_dict

    def __enter__(self) -> Lines[Look]:
        return self

    def __exit__(self, *_: object) -> None: ...

    def show(self, look: Look) -> None:
        print(self._plain(look) if self._to_dict is None else json.dumps(self._to_dict(look)), flush=True)

    def lost(self, error: WatchError) -> None:
        if self._to_dict is not None:
            told = {"code": error.code, "message": error.message, "hint": error.hint}
            known = {name: value for name, value in told.items() if value is not None}
            print(json.dumps({"time": round(time.time(), 3), "error": known}), flush=True)
        else:
            print(f"{time.strftime('%H:%M:%S')} {error}", flush=True)


class Screen(Generic[Look]):
    """One screen that is drawn again at each look. ``draw``: (look, shades of bars, why there is no newer one)
    -> something that rich draws."""

    def __init__(self, draw: Callable[[Look, str, str | None], Any]) -> None:
        from rich.console import Console  # only on a terminal
        from rich.live import Live

        self._draw, self._shades = draw, shades(sys.stdout)
        self._live = Live(console=Console(highlight=False), auto_refresh=False)
        self._last: Look | None = None

    def __enter__(self) -> Screen[Look]:
        return self

    def __exit__(self, *error: Any) -> None:
        self._live.stop()

    def show(self, look: Look) -> None:
        self._last = look
        self._update(self._draw(look, self._shades, None))

    def lost(self, error: WatchError) -> None:
        from rich.text import Text  # only on a terminal

        last = self._last
        self._update(Text(str(error)) if last is None else self._draw(last, self._shades, str(error)))

    def _update(self, drawn: Any) -> None:
        self._live.start()  # with the first look: a failure before it leaves the terminal as it was
        self._live.update(drawn, refresh=True)
