"""Every field that `tonnage doctor` prints as honoured has its effect on the hf engine, at every endpoint.

A row of server/api/fields.py without a check fails. That vLLM honours them: vllm/served/test_fields_honoured.
"""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import openai
import pytest
from endpoints import COMPLETIONS
from honoured import CHECKS, FLAGS, ROWS, TEMPLATE, TOOLS, checked
from serving import PATIENCE, serving

from tonnage.server.api.fields import POOLING_PATHS, TABLES, Standing
from tonnage.server.engines.request import ALL_PARAMS


@pytest.mark.parametrize("path", CHECKS)
def test_every_honoured_request_field_has_a_test_of_its_effect(path: str) -> None:
    honoured = {name for name, rule in TABLES[path].items() if rule.standing is Standing.HONOURED}
    assert honoured - (TOOLS if path != COMPLETIONS else set()) == set(CHECKS[path])
    # These are in vllm/test_embeddings, vllm/test_classifiers, test_scores, test_pooling and
    # test_anthropic_messages.
    others = {*POOLING_PATHS, "/v1/messages", "/v1/messages/count_tokens"}
    assert set(TABLES) - set(CHECKS) == others
    assert {rule.needs for rule in TABLES[path].values() if rule.needs} <= ALL_PARAMS


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    template = tmp_path_factory.mktemp("template") / "tools.jinja"
    template.write_text(TEMPLATE)
    flags = [
        *("--served-model-name", "demo", "--kv-cache-memory-bytes", "256MiB", "--chat-template", str(template)),
        *("--max-model-len", "1024", "--max-num-seqs", "2", "--max-num-batched-tokens", "256", *FLAGS),
    ]
    with (
        serving("demo", "--backend", "hf", *flags) as url,
        httpx.Client(base_url=url, trust_env=False, timeout=PATIENCE) as http,
    ):
        yield http


@pytest.fixture
def client(http: httpx.Client) -> Iterator[openai.OpenAI]:
    with (
        httpx.Client(trust_env=False, timeout=PATIENCE) as other,
        openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="none", max_retries=0, http_client=other) as made,
    ):
        yield made


class TestHf(checked(ROWS)):
    """Each check at every endpoint that has it."""
