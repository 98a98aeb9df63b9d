"""The loop of ``tonnage watch``: observe a server, show the result, and wait for the next interval."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from tonnage.server.watch.client import WatchError

AnyObservation = TypeVar("AnyObservation")
_Shown = TypeVar("_Shown", contravariant=True)


class Output(Protocol[_Shown]):
    """Interface of an output for observations of a server: text lines, a terminal screen or an exporter."""

    def show(self, observe: _Shown) -> None:
        """Show an observation of the watched server."""

    def lost(self, error: WatchError) -> None:
        """Show that the watched server did not answer; `error` has the reason."""


def watch(
    observe: Callable[[], AnyObservation],
    outputs: Sequence[Output[AnyObservation]],
    interval: float | None,
    *,
    patient: bool = False,
) -> None:
    """Observe a server every `interval` seconds and show each result, until the process is stopped.

    Args:
        observe: returns an observation or raises WatchError.
        outputs: the outputs that show each observation.
        interval: seconds between the starts of two observations; None observes once.
        patient: whether to keep trying when the first observation fails, as the server may still be starting.

    Raises:
        WatchError: the first observation failed, and the loop is not patient or observes only once.
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
