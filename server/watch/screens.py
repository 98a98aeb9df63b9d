"""Where looks are shown: lines, or one screen of a terminal."""

from __future__ import annotations

import json
import time
from typing import Any

from tonnage.server.watch.client import WatchError
from tonnage.server.watch.text import drawn, line, plain, to_dict
from tonnage.server.watch.watcher import Watched


class Lines:
    """Plain lines, or JSON: the head when the server or its plan is another one, then a line a look."""

    def __init__(self, as_json: bool) -> None:
        self._json = as_json
        self._head: object = None

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *_: object) -> None: ...

    def show(self, look: Watched) -> None:
        if self._json:
            print(json.dumps(to_dict(look)), flush=True)
            return
        head = (look.told, look.planned, look.notes)
        if head != self._head:
            self._head = head
            print("\n".join(plain(look)))
        print(line(look), flush=True)

    def lost(self, error: WatchError) -> None:
        if self._json:
            told = {"code": error.code, "message": error.message, "hint": error.hint}
            known = {name: value for name, value in told.items() if value is not None}
            print(json.dumps({"time": round(time.time(), 3), "error": known}), flush=True)
        else:
            print(f"{time.strftime('%H:%M:%S')} {error}", flush=True)


class Screen:
    """One screen that is drawn again at each look."""

    def __init__(self) -> None:
        from rich.console import Console  # only on a terminal
        from rich.live import Live

        self._live = Live(console=Console(highlight=False), auto_refresh=False)
        self._last: Watched | None = None

    def __enter__(self) -> Screen:
        self._live.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._live.__exit__(*error)

    def show(self, look: Watched) -> None:
        self._last = look
        self._live.update(drawn(look), refresh=True)

    def lost(self, error: WatchError) -> None:
        from rich.text import Text  # only on a terminal

        shown = Text(str(error)) if self._last is None else drawn(self._last, str(error))
        self._live.update(shown, refresh=True)
