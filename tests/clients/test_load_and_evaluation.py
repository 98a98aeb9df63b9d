"""lm-eval (log likelihoods and generated text) and ``vllm bench serve``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
QUESTIONS = [("The capital of France is", 0), ("The capital of Norway is", 1)]


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the part of an lm-eval task that names its data, a local file."""
    file = tmp_path_factory.mktemp("task") / "test.jsonl"
    file.write_text("".join(json.dumps({"question": text, "answer": at}) + "\n" for text, at in QUESTIONS))
    return {
        "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(file)}}, "test_split": "test",
        "doc_to_text": "{{question}}",
    }  # fmt: skip


def evaluated(kind: str, url: str, model: Path, task: dict[str, Any], **more: Any) -> dict[str, Any]:
    import lm_eval

    arguments = {
        "model": "demo",
        "base_url": url,
        "tokenizer": str(model),
        "num_concurrent": 2,
        "max_retries": 1,
    }
    found = lm_eval.simple_evaluate(
        model=kind, model_args=arguments, tasks=[task], bootstrap_iters=0, log_samples=True, **more
    )
    results: dict[str, Any] = found["results"][task["task"]]
    return results


def test_lm_eval_computes_log_likelihoods_with_the_server(
    url: str, model: Path, questions: dict[str, Any]
) -> None:
    task = {
        "task": "capitals", "output_type": "multiple_choice", "doc_to_choice": ["Paris", "Oslo"],
        "doc_to_target": "{{answer}}", "metric_list": [{"metric": "acc"}],
    }  # fmt: skip
    found = evaluated("local-completions", f"{url}/v1/completions", model, questions | task)
    assert found["acc,none"] == 1.0


@pytest.mark.parametrize("kind", ["local-completions", "local-chat-completions"])
def test_lm_eval_runs_a_generation_task_with_the_server(
    url: str, model: Path, questions: dict[str, Any], kind: str
) -> None:
    task = {
        "task": "said", "output_type": "generate_until", "doc_to_target": "{{['Paris', 'Oslo'][answer]}}",
        "metric_list": [{"metric": "exact_match"}],
        "generation_kwargs": {"until": [".", "\n\n", "Q:", "</s>", "<|im_end|>", "A:"], "max_gen_toks": 16},
    }  # fmt: skip
    chat = kind == "local-chat-completions"
    path = "chat/completions" if chat else "completions"
    found = evaluated(kind, f"{url}/v1/{path}", model, questions | task, apply_chat_template=chat)
    assert 0 <= found["exact_match,none"] <= 1


def test_vllm_bench_serve_completes_all_requests(
    url: str, model: Path, python: str, run: Callable[..., str]
) -> None:
    start = f"import sys; sys.path.insert(0, {str(BENCHMARKS)!r}); import load_tools; exec(load_tools.VLLM)"
    report = run(
        python, "-c", start, "bench", "serve", "--base-url", url, "--model", "demo", "--tokenizer", str(model),
        *("--dataset-name", "random", "--random-input-len", "32", "--random-output-len", "8"),
        *("--num-prompts", "8", "--max-concurrency", "4"),
    )  # fmt: skip
    assert "Successful requests:                     8" in report
