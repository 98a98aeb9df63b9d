"""Tests of classifiers behind vLLM: values equal transformers', and shapes are those of vLLM's protocol."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from classifiers import save_demo_classifier, save_minilm_classifier
from serving import PATIENCE, serving
from transformers import AutoTokenizer

from tonnage.planner.deployment import Deployment
from tonnage.planner.errors import DeploymentError
from tonnage.planner.planning.build import make_plan
from tonnage.server.commands.launch import make_engine
from tonnage.server.settings import Settings

needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed (extra vllm)")

TEXTS = ["A fox runs over the hill.", "Ein Fuchs.", "def f(x): return x", "The bank raised its rates. " * 9]


@contextmanager
def served(folder: Path, *flags: str) -> Iterator[httpx.Client]:
    arguments = ("--backend", "vllm", "--dtype", "float32", "--max-num-seqs", "8", "--served-model-name", "m")
    with (
        serving(str(folder), *arguments, *flags) as url,
        httpx.Client(base_url=url, trust_env=False, timeout=PATIENCE) as http,
    ):
        yield http


def logits_of(model: Any, tokenizer: Any, *texts: Any) -> torch.Tensor:
    """Return transformers' logits of one text, or of a pair of texts."""
    with torch.inference_mode():
        return model(**tokenizer(*texts, return_tensors="pt")).logits[0]


def post(http: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    response = http.post(path, json={"model": "m"} | body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def rejected(http: httpx.Client, path: str, **body: Any) -> str:
    response = http.post(path, json={"model": "m"} | body)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "unsupported_endpoint"), response.text
    return str(error["message"])


@needs_vllm
def test_cross_encoder_scores_of_vllm_equal_transformers(tmp_path: Path) -> None:
    """A BERT with one label: pairs have token types, and the score is the sigmoid of the logit."""
    from vllm.entrypoints.pooling.classify.protocol import ClassificationResponse
    from vllm.entrypoints.pooling.pooling.protocol import PoolingResponse
    from vllm.entrypoints.pooling.scoring.protocol import RerankResponse, ScoreResponse

    model = save_minilm_classifier(tmp_path, ["relevant"])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    query, documents = TEXTS[0], TEXTS[1:]
    logits = torch.cat([logits_of(model, tokenizer, query, document) for document in documents])
    with torch.inference_mode():
        ids = [tokenizer(query, document, return_tensors="pt")["input_ids"] for document in documents]
        without_types = torch.cat([model(pair).logits[0] for pair in ids])
    assert (logits - without_types).abs().min() > 0.1  # the tolerances notice wrong token types
    scores = logits.sigmoid().tolist()
    assert max(scores) - min(scores) > 0.05
    with served(tmp_path) as http:
        for path in ("/v1/score", "/score"):
            answer = post(http, path, queries=query, documents=documents)
            ScoreResponse.model_validate(answer, strict=True)
            assert [item["score"] for item in answer["data"]] == pytest.approx(scores, abs=1e-3)
        raw = post(http, "/v1/score", text_1=[query] * 3, text_2=documents, use_activation=False)
        assert [item["score"] for item in raw["data"]] == pytest.approx(logits.tolist(), abs=5e-3)
        pairs = [tokenizer(query, document)["input_ids"] for document in documents]
        assert answer["usage"]["prompt_tokens"] == sum(map(len, pairs))
        answer = post(http, "/v1/rerank", query=query, documents=documents, top_n=2)
        RerankResponse.model_validate(answer, strict=True)
        best = sorted(range(3), key=lambda at: -scores[at])[:2]
        assert [result["index"] for result in answer["results"]] == best
        answer = post(http, "/classify", input=query)
        ClassificationResponse.model_validate(answer, strict=True)
        alone = logits_of(model, tokenizer, query).sigmoid().tolist()
        assert answer["data"][0]["probs"] == pytest.approx(alone, abs=1e-3)
        assert (answer["data"][0]["label"], answer["data"][0]["num_classes"]) == ("relevant", 1)
        answer = post(http, "/pooling", input=TEXTS[:2], task="classify")
        PoolingResponse.model_validate(answer, strict=True)
        assert answer["data"][0]["data"] == pytest.approx(alone, abs=1e-3)
        assert "classifies texts" in rejected(http, "/v1/embeddings", input=query)
        assert "use /classify" in rejected(http, "/v1/completions", prompt="a", max_tokens=1)
        memory = http.get("/memory").json()
    assert memory["measured"]["kv_pool_bytes"] == memory["plan"]["ranks"][0]["kv_pool_bytes"] == 0


@needs_vllm
def test_decoder_classifier_values_of_vllm_equal_transformers(tmp_path: Path) -> None:
    """A Llama with three labels: softmax of the last token's logits; no score, because no label is one."""
    model = save_demo_classifier(tmp_path, ["bad", "fine", "good"])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    logits = torch.stack([logits_of(model, tokenizer, text) for text in TEXTS])
    expected = logits.softmax(1)
    assert (expected[0] - expected[1]).abs().max() > 0.02
    pool = ("--kv-cache-memory-bytes", "64MiB", "--max-model-len", "512", "--max-num-batched-tokens", "512")
    with served(tmp_path, *pool) as http:
        ids = [tokenizer(text)["input_ids"] for text in TEXTS]
        for given in (TEXTS, ids):
            data = post(http, "/classify", input=given)["data"]
            torch.testing.assert_close(torch.tensor([d["probs"] for d in data]), expected, atol=1e-3, rtol=0)
            names = [("bad", "fine", "good")[int(row.argmax())] for row in expected]
            assert [item["label"] for item in data] == names
        raw = post(http, "/pooling", input=TEXTS, use_activation=False)["data"]
        torch.testing.assert_close(torch.tensor([d["data"] for d in raw]), logits, atol=1e-2, rtol=0)
        assert "3 labels" in rejected(http, "/v1/score", queries="a", documents="b")
        assert "3 labels" in rejected(http, "/v1/rerank", query="a", documents=["b"])
        refused = http.post("/classify", json={"model": "m", "input": "word " * 600}).json()["error"]
        assert (refused["code"], refused["param"]) == ("context_length_exceeded", "input")
        blocks = http.get("/memory").json()["pool"]["blocks"]
        assert (blocks["used"], blocks["promised"]) == (0, 0)


@needs_vllm
def test_token_classifier_returns_values_for_every_token(tmp_path: Path) -> None:
    model = save_minilm_classifier(tmp_path, ["O", "NAME"], tokens=True)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    with served(tmp_path) as http:
        answer = post(http, "/pooling", input=TEXTS[:2])
        for text, item in zip(TEXTS, answer["data"], strict=False):
            expected = logits_of(model, tokenizer, text).softmax(1)
            torch.testing.assert_close(torch.tensor(item["data"]), expected, atol=1e-3, rtol=0)
        assert "classifies tokens" in rejected(http, "/classify", input="a")


@needs_vllm
def test_classifier_is_rejected_by_backends_other_than_vllm(tmp_path: Path) -> None:
    save_minilm_classifier(tmp_path, ["relevant"])
    plan = make_plan(str(tmp_path), Deployment(engine="vllm"))
    with pytest.raises(DeploymentError, match="classifier: it generates no text"):
        make_engine(Settings(model=str(tmp_path), backend="vllm", runner="generate"), plan)
    with pytest.raises(DeploymentError, match="--backend vllm"):
        make_engine(Settings(model=str(tmp_path), backend="hf"), plan)
