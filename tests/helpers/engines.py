"""Fake engines that wait for the test, however slow the machine is."""

from __future__ import annotations

import asyncio
from typing import Any

from tonnage.planner.plans import Plan
from tonnage.server.engines.fake import FakeEngine


class Loading(FakeEngine):
    """Loads until ``loaded`` is set."""

    def __init__(self, plan: Plan, **more: Any) -> None:
        super().__init__(plan, **more)
        self.loaded = asyncio.Event()

    async def start(self) -> None:
        await self.loaded.wait()
        await super().start()


class Held(FakeEngine):
    """Makes no step while ``held``: what runs goes on running."""

    held = False

    def step(self) -> Any:
        return None if self.held else super().step()
