"""DNS rebinding: a server without keys on loopback does not answer under a name of another site."""

from __future__ import annotations

import pytest

from tonnage.server.engines.fake import FakeEngine
from tonnage.server.errors import ErrorCode
from tonnage.server.security.hosts import allowed_hosts

KEY = "first-key-of-the-tests"


@pytest.mark.parametrize("path", ["/", "/memory", "/v1/models", "/openapi.json", "/health"])
async def test_host_header_of_another_site_is_rejected_naming_the_flag_allowed_hosts(
    server, checked, path: str
) -> None:
    error = checked(await server.http.get(path, headers={"host": "evil.example:8000"}))
    assert error.code == ErrorCode.PERMISSION_DENIED
    assert "--allowed-hosts evil.example" in error.message


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:8000", "127.0.0.1", "127.0.0.1:1", "[::1]:8000", "localhost.", "box:8000"]
)
async def test_host_header_with_a_loopback_name_is_accepted(server, host: str) -> None:
    assert (await server.http.get("/memory", headers={"host": host})).status_code == 200


async def test_host_header_named_by_allowed_hosts_is_accepted(run_server, small_plan) -> None:
    async with run_server(FakeEngine(small_plan()), allowed_hosts=("llm.example",)) as server:
        for host, status in (("llm.example:443", 200), ("localhost", 200), ("other.example", 403)):
            assert (await server.http.get("/memory", headers={"host": host})).status_code == status


async def test_server_with_api_keys_accepts_every_host_header(run_server, small_plan) -> None:
    async with run_server(FakeEngine(small_plan()), api_key=(KEY,)) as server:
        headers = {"host": "llm.example", "authorization": f"Bearer {KEY}"}
        assert (await server.http.get("/memory", headers=headers)).status_code == 200


def test_host_header_is_not_checked_on_a_non_loopback_address_without_the_flag_allowed_hosts() -> None:
    assert allowed_hosts("0.0.0.0", (), keys=False) is None
    assert allowed_hosts("127.0.0.1", (), keys=True) is None
    assert allowed_hosts("127.0.0.2", (), keys=False) == {"127.0.0.2", "localhost", "127.0.0.1", "::1"}
    assert "llm.example" in (allowed_hosts("0.0.0.0", ("LLM.example",), keys=True) or ())
