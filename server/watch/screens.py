"""Output of observations: lines of text or JSON, or one screen of a terminal."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, Generic, TypeVar

from tonnage.planner.bars import redraws, shades
from tonnage.server.watch.client import WatchError

AnyObservation = TypeVar("AnyObservation")


class Lines(Generic[AnyObservation]):
    """An output that prints each observation of a server as lines of text, or as one JSON object per line."""

    def __init__(
        self,
        plain: Callable[[AnyObservation], str],
        to_dict: Callable[[AnyObservation], dict[str, Any]] | None,
        between: str = "",
    ) -> None:
        """Create an output of lines on stdout.

        Args:
            plain: returns the text of an observation.
            to_dict: returns the JSON object of an observation; None prints text instead of JSON.
            between: text printed between two observations.
        """
        self._plain, self._to_dict, self._between = plain, to_dict, between
        self._first = True

    def __enter__(self) -> Lines[AnyObservation]:
        return self

    def __exit__(self, *_: object) -> None: ...

    def show(self, observation: AnyObservation) -> None:
        """Print an observation of the watched server."""
        if self._to_dict is not None:
            print(json.dumps(self._to_dict(observation)), flush=True)
            return
        print("" if self._first else self._between, self._plain(observation), sep="", flush=True)
        self._first = False

    def lost(self, error: WatchError) -> None:
        """Print the error of an observation that failed."""
        if self._to_dict is not None:
            values = {"code": error.code, "message": error.message, "hint": error.hint}
            known = {name: value for name, value in values.items() if value is not None}
            print(json.dumps({"time": round(time.time(), 3), "error": known}), flush=True)
        else:
            print(f"{time.strftime('%H:%M:%S')} {error}", flush=True)


def draws() -> bool:
    """Return whether stdout is a terminal that can be redrawn and rich is installed."""
    return redraws(sys.stdout) and find_spec("rich") is not None


class Screen(Generic[AnyObservation]):
    """An output that redraws the terminal screen for each observation of a server.

    Args:
        draw: returns a rich renderable. It takes an observation, the characters for the bars, and the error of
            the last attempt to observe the server if that attempt failed, else None.
        again: whether to redraw the screen in place; False prints each observation below the previous one.
    """

    def __init__(self, draw: Callable[[AnyObservation, str, str | None], Any], *, again: bool = True) -> None:
        from rich.console import Console  # imported here, because only output on a terminal needs rich
        from rich.live import Live

        self._draw, self._shades, self._again = draw, shades(sys.stdout), again
        self._live = Live(console=Console(highlight=False), auto_refresh=False)
        self._last: AnyObservation | None = None

    def __enter__(self) -> Screen[AnyObservation]:
        return self

    def __exit__(self, *error: Any) -> None:
        self._live.stop()

    def show(self, observation: AnyObservation) -> None:
        """Draw an observation of the watched server."""
        self._last = observation
        self._update(self._draw(observation, self._shades, None))

    def lost(self, error: WatchError) -> None:
        """Redraw the last observation together with the error of the attempt that failed after it."""
        from rich.text import Text  # imported here, because only output on a terminal needs rich

        last = self._last
        self._update(Text(str(error)) if last is None else self._draw(last, self._shades, str(error)))

    def _update(self, drawn: Any) -> None:
        if not self._again:
            self._live.console.print(drawn)
            return
        # The screen starts only now, so that an error before the first observation leaves the terminal alone.
        self._live.start()
        self._live.update(drawn, refresh=True)
