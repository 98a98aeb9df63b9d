"""Look, show, wait."""

from __future__ import annotations

import time

from tonnage.server.watch.client import WatchError
from tonnage.server.watch.export import Exporter
from tonnage.server.watch.screens import Lines, Screen
from tonnage.server.watch.watcher import Watcher


def watch(watcher: Watcher, screen: Lines | Screen, exporter: Exporter | None, interval: float | None) -> None:
    """Looks every ``interval`` seconds until it is stopped; once where that is None. Raises WatchError where
    the server cannot be read and nothing says that it once could, or will be."""
    patient = exporter is not None
    while True:
        begun = time.monotonic()
        try:
            look = watcher.look()
        except WatchError as error:
            if interval is None or not patient:
                raise
            screen.lost(error)
            if exporter is not None:
                exporter.lose()
        else:
            patient = True
            screen.show(look)
            if exporter is not None:
                exporter.show(look)
        if interval is None:
            return
        time.sleep(max(0.0, begun + interval - time.monotonic()))
