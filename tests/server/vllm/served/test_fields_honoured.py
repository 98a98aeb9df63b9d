"""Every field that `tonnage doctor` prints as honoured has its effect on vLLM.

Each check once, at the first endpoint that has it: what differs between the backends lies behind the endpoints.
That each row has a check is in ../test_fields_honoured.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import httpx
import pytest
from honoured import ONCE, checked
from serving import PATIENCE

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed (extra vllm)")


@pytest.fixture
def http(server: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server, trust_env=False, timeout=PATIENCE) as http:
        yield http


class TestVllm(checked(ONCE)):
    """Run each check once on vLLM."""
