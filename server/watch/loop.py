"""The loop that observes a server, shows the result and waits."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from tonnage.server.watch.client import WatchError

AnyObservation = TypeVar("AnyObservation")
_Shown = TypeVar("_Shown", contravariant=True)


class Output(Protocol[_Shown]):
    """A place that shows observations of the watched server: lines, a terminal screen or an exporter."""

    def show(self, observe: _Shown) -> None:
        """Show an observation of the watched server."""

    def lost(self, error: WatchError) -> None:
        """Show that the server does not answer."""


def watch(
    observe: Callable[[], AnyObservation],
    outputs: Sequence[Output[AnyObservation]],
    interval: float | None,
    *,
    patient: bool = False,
) -> None:
    """Observe and show every `interval` seconds until the process is stopped, or once when it is None.

    Args:
        observe: returns an observation or raises WatchError.
        outputs: the outputs.
        interval: seconds between the starts of two observations.
        patient: also wait for a server that has never answered.

    Raises:
        WatchError: the only observation, or the first of an impatient loop, failed.
    """
    while True:
        begun = time.monotonic()
        try:
            found = observe()
        except WatchError as error:
            if interval is None or not patient:
                raise
            for output in outputs:
                output.lost(error)
        else:
            patient = True
            for output in outputs:
                output.show(found)
        if interval is None:
            return
        time.sleep(max(0.0, begun + interval - time.monotonic()))
