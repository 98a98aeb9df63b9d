"""Tests of /v1/embeddings behind vLLM: a decoder's and an encoder's embeddings equal transformers'."""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from classifiers import minilm_folder
from openai.types import CreateEmbeddingResponse
from serving import PATIENCE, serving
from transformers import AutoModel, AutoTokenizer

from tonnage.planner.deployment import Deployment
from tonnage.planner.errors import DeploymentError
from tonnage.planner.planning.build import make_plan
from tonnage.server.commands.launch import make_engine
from tonnage.server.demo.model import ensure_demo
from tonnage.server.settings import Settings

needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed (extra vllm)")

TEXTS = ["A fox runs over the hill.", "Ein Fuchs.", "def f(x): return x", "The bank raised its rates. " * 9]
POOL = "256MiB"


@contextmanager
def served(model: str, *flags: str) -> Iterator[openai.OpenAI]:
    with (
        serving(model, "--backend", "vllm", "--dtype", "float32", "--max-num-seqs", "8", *flags) as url,
        httpx.Client(trust_env=False, timeout=PATIENCE) as http,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=http) as made,
    ):
        yield made


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    flags = ("--runner", "pooling", "--kv-cache-memory-bytes", POOL, "--max-model-len", "512")
    with served("demo", *flags) as made:
        yield made


@needs_vllm
def test_encoder_embeddings_equal_the_mean_of_transformers_hidden_states() -> None:
    """all-MiniLM-L6-v2: the embedding is the normalized mean over the tokens, as its own files say.

    Its tokenizer.json truncates at 128 tokens and pads to 128. The model takes 256, and padding must not enter
    the mean.
    """
    folder = minilm_folder()
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).float()
    texts = [*TEXTS, "Rain fell on the hills. " * 30]
    expected = []
    with torch.inference_mode():
        for text in texts:
            states = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
            expected.append(states.mean(0) / states.mean(0).norm())
    held = {t.data_ptr(): t.nbytes for t in (*model.parameters(), *model.buffers())}
    assert make_plan(str(folder), Deployment(dtype="float32")).rank.weights_bytes == sum(held.values())
    with served(str(folder), "--served-model-name", "minilm") as client:
        answer = client.embeddings.create(model="minilm", input=texts, encoding_format="float")
        found = torch.tensor([item.embedding for item in answer.data])
        assert (found * torch.stack(expected)).sum(1).min() > 0.999
        torch.testing.assert_close(found, torch.stack(expected), atol=2e-4, rtol=0)
        assert answer.usage.prompt_tokens == sum(len(tokenizer(text)["input_ids"]) for text in texts)
        url, http = str(client.base_url).removesuffix("/v1/"), client._client
        at_most = "word " * 254  # and the two special tokens
        assert len(client.embeddings.create(model="minilm", input=at_most).data) == 1
        too_long = http.post(f"{url}/v1/embeddings", json={"model": "minilm", "input": f"{at_most} word"})
        assert too_long.json()["error"]["code"] == "context_length_exceeded"
        refused = http.post(f"{url}/v1/completions", json={"model": "minilm", "prompt": "a", "max_tokens": 1})
        assert refused.json()["error"]["code"] == "unsupported_endpoint"
        memory = http.get(f"{url}/memory").json()
    assert memory["plan"]["kv_cache"]["bytes_per_token"] == 0
    assert memory["measured"]["kv_pool_bytes"] == memory["plan"]["ranks"][0]["kv_pool_bytes"] == 0


@needs_vllm
def test_decoder_embeddings_of_vllm_equal_transformers(client: openai.OpenAI) -> None:
    """The embedding is the last token's normalized hidden state, vLLM's default without a pooling config."""
    folder = ensure_demo()
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).float()
    with torch.inference_mode():
        states = [model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0, -1] for text in TEXTS]
    expected = torch.stack([state / state.norm() for state in states])
    answer = client.embeddings.create(model="demo", input=TEXTS, encoding_format="float")
    assert [item.index for item in answer.data] == list(range(len(TEXTS)))
    found = torch.tensor([item.embedding for item in answer.data])
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=0)
    assert (expected[0] - expected[1]).abs().max() > 0.01  # the tolerance tells texts apart
    ids = [tokenizer(text)["input_ids"] for text in TEXTS]
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, ids))
    for given in (TEXTS[0], ids[0], [ids[0]]):
        again = client.embeddings.create(model="demo", input=given, encoding_format="float").data[0].embedding
        torch.testing.assert_close(torch.tensor(again), expected[0], atol=2e-4, rtol=0)


@needs_vllm
def test_embedding_responses_match_openais_schema_and_free_all_blocks(client: openai.OpenAI) -> None:
    url, http = str(client.base_url).removesuffix("/v1/"), client._client
    body: dict[str, Any] = {"model": "demo", "input": TEXTS[:1]}
    plain = http.post(f"{url}/v1/embeddings", json=body | {"user": "me"})
    assert plain.headers["x-ignored-fields"] == "user"
    CreateEmbeddingResponse.model_validate_json(plain.content, strict=True)
    packed = http.post(f"{url}/v1/embeddings", json=body | {"encoding_format": "base64"}).json()
    raw = base64.b64decode(packed["data"][0]["embedding"])
    floats = torch.tensor(struct.unpack(f"<{len(raw) // 4}f", raw))
    torch.testing.assert_close(floats, torch.tensor(plain.json()["data"][0]["embedding"]), atol=2e-4, rtol=0)
    for change, code, param in (
        ({"input": "word " * 600}, "context_length_exceeded", "input"),
        ({"input": []}, "invalid_value", "input"),
        ({"input": [[]]}, "invalid_value", "input"),
        ({"input": [10**6]}, "invalid_value", "input"),
        ({"encoding_format": "int8"}, "invalid_value", "encoding_format"),
        ({"dimensions": 8}, "invalid_value", None),  # by vLLM: the model was not trained for it
        ({"model": "other"}, "model_not_found", "model"),
    ):
        error = http.post(f"{url}/v1/embeddings", json=body | change).json()["error"]
        assert (error["code"], error["param"]) == (code, param), (change, error)
    for path, more in (("completions", {"prompt": "a"}), ("chat/completions", {"messages": []})):
        refused = http.post(f"{url}/v1/{path}", json={"model": "demo", "max_tokens": 1, **more})
        assert refused.status_code == 400
    with ThreadPoolExecutor(8) as pool:  # more at once than fit into a batch
        answers = list(
            pool.map(lambda at: client.embeddings.create(model="demo", input=f"{at} " * 20), range(24))
        )
    assert all(len(answer.data[0].embedding) == 576 for answer in answers)
    blocks = http.get(f"{url}/memory").json()["pool"]["blocks"]
    assert (blocks["used"], blocks["promised"]) == (0, 0)
    page = http.get(f"{url}/metrics").text.splitlines()
    counts = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in page if line[:1] != "#"}
    received = sum(
        value for name, value in counts.items() if name.startswith("tonnage_requests_received_total")
    )
    outcomes = sum(value for name, value in counts.items() if name.startswith("tonnage_requests_total{"))
    assert received == outcomes > 24


@needs_vllm
def test_score_endpoint_returns_cosines_of_the_models_embeddings(client: openai.OpenAI) -> None:
    url, http = str(client.base_url).removesuffix("/v1/"), client._client
    answer = client.embeddings.create(model="demo", input=TEXTS, encoding_format="float")
    vectors = torch.tensor([item.embedding for item in answer.data])
    expected = torch.cosine_similarity(vectors[0], vectors[1:]).tolist()
    body = {"model": "demo", "queries": TEXTS[0], "documents": TEXTS[1:]}
    for path in ("v1/score", "score"):
        data = http.post(f"{url}/{path}", json=body).json()["data"]
        assert [item["score"] for item in data] == pytest.approx(expected, abs=1e-3)
    body = {"model": "demo", "query": TEXTS[0], "documents": TEXTS[1:], "top_n": 2}
    for path in ("v1/rerank", "rerank", "v2/rerank"):
        results = http.post(f"{url}/{path}", json=body).json()["results"]
        best = sorted(range(3), key=lambda at: -expected[at])[:2]
        assert [result["index"] for result in results] == best
        assert [result["relevance_score"] for result in results] == pytest.approx(
            [expected[at] for at in best], abs=1e-3
        )


def test_embedding_models_are_rejected_by_backends_other_than_vllm(tmp_path: Path) -> None:
    plan = make_plan("demo", Deployment(kv_cache_memory_bytes=2**28))
    for backend in ("hf", "fake"):
        with pytest.raises(DeploymentError, match="--backend vllm"):
            make_engine(Settings(model="demo", backend=backend, runner="pooling"), plan)


@needs_vllm
def test_generation_request_to_an_encoder_model_is_rejected() -> None:
    folder = str(minilm_folder())
    plan = make_plan(folder, Deployment(engine="vllm"))
    with pytest.raises(DeploymentError, match="generates no text"):
        make_engine(Settings(model=folder, backend="vllm", runner="generate"), plan)
    with pytest.raises(DeploymentError, match="--backend vllm"):
        make_engine(Settings(model=folder, backend="hf"), plan)
