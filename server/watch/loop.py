"""Look, show, wait."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from tonnage.server.watch.client import WatchError

Look = TypeVar("Look")
_Shown = TypeVar("_Shown", contravariant=True)


class Shows(Protocol[_Shown]):
    """A place where looks are shown."""

    def show(self, look: _Shown) -> None: ...

    def lost(self, error: WatchError) -> None:
        """The server does not answer."""


def watch(
    look: Callable[[], Look], places: Sequence[Shows[Look]], interval: float | None, *, patient: bool = False
) -> None:
    """Looks every ``interval`` seconds until it is stopped; once where that is None. Raises WatchError where
    the server cannot be read and nothing says that it once could, or (``patient``) will be."""
    while True:
        begun = time.monotonic()
        try:
            found = look()
        except WatchError as error:
            if interval is None or not patient:
                raise
            for place in places:
                place.lost(error)
        else:
            patient = True
            for place in places:
                place.show(found)
        if interval is None:
            return
        time.sleep(max(0.0, begun + interval - time.monotonic()))
