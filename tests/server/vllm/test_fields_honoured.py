"""Every field that `tonnage doctor` prints as honoured has its effect on vLLM.

Each check once, at the first endpoint that has it: what differs between the backends lies behind the endpoints.
That each row has a check is in ../test_fields_honoured.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import httpx
import openai
import pytest
from endpoints import Api
from honoured import AT_FAULT, CHECKS, ONCE, forced_calls, free_calls, refused
from serving import PATIENCE

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed (extra vllm)")


@pytest.fixture
def http(server: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server, trust_env=False, timeout=PATIENCE) as http:
        yield http


@pytest.mark.parametrize(("path", "field"), ONCE)
def test_honoured(http: httpx.Client, path: str, field: str) -> None:
    CHECKS[path][field](Api(http, path))


@pytest.mark.parametrize("fault", AT_FAULT)
def test_a_grammar_at_fault_is_the_clients(http: httpx.Client, fault: str) -> None:
    refused(http, fault)


def test_forced_calls_of_a_real_model(client: openai.OpenAI) -> None:
    forced_calls(client)


def test_free_calls_of_a_real_model(client: openai.OpenAI) -> None:
    free_calls(client)
