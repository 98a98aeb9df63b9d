"""The page of a replica on Ray: its requests come another way, so the page takes none."""

from __future__ import annotations

import httpx
import pytest

from tonnage.server.app import create_app
from tonnage.server.engines.fake import FakeEngine
from tonnage.server.settings import load_settings


@pytest.fixture
def page(small_plan, tokenizer) -> httpx.AsyncClient:
    engine = FakeEngine(small_plan())
    app = create_app(load_settings(model="demo"), engine, tokenizer, operations_only=True)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://page")


async def test_operations_only_app_serves_metrics_and_health_but_no_generation(page: httpx.AsyncClient) -> None:
    async with page:
        assert (await page.get("/health")).status_code == 200
        # It listens on the node's address, so every name of the node is answered.
        assert (await page.get("/health", headers={"host": "192.0.2.2:42937"})).status_code == 200
        assert "tonnage_memory_planned_bytes" in (await page.get("/metrics")).text
        assert (await page.get("/memory")).status_code == 200
        paths = (await page.get("/openapi.json")).json()["paths"]
        assert {method for path in paths.values() for method in path} == {"get"}
        for route in (
            "/v1/completions",
            "/v1/chat/completions",
            "/v1/responses",
            "/v1/embeddings",
            "/tokenize",
        ):
            answer = await page.post(route, json={"model": "demo", "prompt": "Hi"})
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_url")
