"""Memory of the API process after large requests: free memory and rejected bodies are given back."""

from __future__ import annotations

import gc
import subprocess
import sys
from typing import Any

import httpx
from serving import PATIENCE

from tonnage.server.errors import ApiError
from tonnage.server.http.protocol import BoundedHttpProtocol

# Prints the bytes of the process before, with 64 MiB of small blocks, and 3 s after they were freed. Every
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
    blocks = [bytes(4000) for _ in range(16_000)]
    kept, most = blocks[::100], anonymous_bytes()
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


def connections_in_memory() -> int:
    return sum(isinstance(each, BoundedHttpProtocol) for each in gc.get_objects())


async def test_ended_and_rejected_requests_are_freed_without_garbage_collection(server: Any) -> None:
    bodies = [{"prompt": "hello", "max_tokens": 2}, {"prompt": "hello", "max_tokens": "x" * 1000}]
    await server.complete(max_tokens=1)
    gc.collect()
    before = connections_in_memory()
    gc.disable()
    try:
        for body in bodies * 5:
            async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE) as client:
                response = await client.post("/v1/completions", json={"model": "demo", **body})
            assert response.status_code == (200 if body is bodies[0] else 400)
        await server.until(lambda: connections_in_memory() <= before)
        assert not any(isinstance(each, ApiError) for each in gc.get_objects())
    finally:
        gc.enable()
