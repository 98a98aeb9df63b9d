"""Memory of the API process after large requests: free memory and rejected bodies are given back."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref

import httpx
from fastapi import FastAPI
from serving import PATIENCE

from tonnage.server.errors import ApiError, ErrorCode, install

# Prints the bytes of the process before, with 64 MiB of small blocks, and 3 s after they are garbage. Every
# hundredth block stays in use, as requests that arrived meanwhile do.
GROW_AND_SHRINK = """
import asyncio
from tonnage.server.engines.heap import bound_heap, settle_heap, shrink_heap
from tonnage.server.engines.process_memory import anonymous_bytes
async def main():
    bound_heap()
    settle_heap()
    shrinking = asyncio.create_task(shrink_heap())
    await asyncio.sleep(0)
    before = anonymous_bytes()
    blocks = [[bytes(4000)] for _ in range(16_000)]
    for block in blocks:
        block.append(block)  # a cycle: only the garbage collector frees it
    kept = [block[0] for block in blocks[::100]]
    block, most = None, anonymous_bytes()
    del blocks
    await asyncio.sleep(3)
    print(before, most, anonymous_bytes(), len(kept))
asyncio.run(main())
"""


def test_free_memory_between_blocks_in_use_returns_to_the_kernel() -> None:
    done = subprocess.run(
        [sys.executable, "-c", GROW_AND_SHRINK], capture_output=True, text=True, check=True, timeout=PATIENCE
    )
    before, most, after, _ = map(int, done.stdout.split())
    assert most > before + 60 * 2**20
    assert after < before + 8 * 2**20


class Body:
    """A request body, whose end can be observed."""


async def test_rejected_request_is_freed_without_garbage_collection() -> None:
    app, bodies = FastAPI(), []
    install(app, lambda *_: None)

    @app.get("/")
    async def reject() -> None:
        body = Body()
        bodies.append(weakref.ref(body))
        raise ApiError(ErrorCode.INVALID_VALUE, "no")

    gc.disable()
    try:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            assert (await client.get("/")).status_code == 400
        assert [body() for body in bodies] == [None]
    finally:
        gc.enable()
