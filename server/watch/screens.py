"""Where looks are shown: lines, or one screen of a terminal."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, Generic, TypeVar

from tonnage.planner.bars import redraws, shades
from tonnage.server.watch.client import WatchError

Look = TypeVar("Look")


class Lines(Generic[Look]):
    """Plain lines, or JSON: one object a look, one a line."""

    def __init__(
        self, plain: Callable[[Look], str], to_dict: Callable[[Look], dict[str, Any]] | None, between: str = ""
    ) -> None:
        """``to_dict`` None: no JSON. ``plain``: the lines of a look; ``between``: of two looks."""
        self._plain, self._to_dict, self._between = plain, to_dict, between
        self._first = True

    def __enter__(self) -> Lines[Look]:
        return self

    def __exit__(self, *_: object) -> None: ...

    def show(self, look: Look) -> None:
        if self._to_dict is not None:
            print(json.dumps(self._to_dict(look)), flush=True)
            return
        print("" if self._first else self._between, self._plain(look), sep="", flush=True)
        self._first = False

    def lost(self, error: WatchError) -> None:
        if self._to_dict is not None:
            told = {"code": error.code, "message": error.message, "hint": error.hint}
            known = {name: value for name, value in told.items() if value is not None}
            print(json.dumps({"time": round(time.time(), 3), "error": known}), flush=True)
        else:
            print(f"{time.strftime('%H:%M:%S')} {error}", flush=True)


def draws() -> bool:
    """Whether stdout is a terminal for a screen, and rich, which comes with the extras, is there to draw it."""
    return redraws(sys.stdout) and find_spec("rich") is not None


class Screen(Generic[Look]):
    """One screen that is drawn again at each look (``again``; else once). ``draw``: (look, shades of bars, why
    there is no newer one) -> something that rich draws."""

    def __init__(self, draw: Callable[[Look, str, str | None], Any], *, again: bool = True) -> None:
        from rich.console import Console  # only on a terminal
        from rich.live import Live

        self._draw, self._shades, self._again = draw, shades(sys.stdout), again
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
        if not self._again:
            self._live.console.print(drawn)
            return
        self._live.start()  # with the first look: a failure before it leaves the terminal as it was
        self._live.update(drawn, refresh=True)
