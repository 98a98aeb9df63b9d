"""The three endpoints that generate, asked in one way and answering in one form."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import httpx

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"


@dataclass
class Answer:
    """What the three endpoints say in one form."""

    texts: list[str]
    finishes: list[str]
    prompt_tokens: int
    completion_tokens: int
    cached: int
    document: dict[str, Any]

    @property
    def text(self) -> str:
        return self.texts[0]


def cached_tokens(http: httpx.Client, system: str, salt: str) -> int:
    """Return how many prompt tokens of a chat that begins with ``system`` were found in the prefix cache."""
    messages = [{"role": "system", "content": system}, {"role": "user", "content": "A berth?"}]
    body = {"model": "demo", "messages": messages, "max_tokens": 1, "cache_salt": salt}
    answer = http.post(CHAT, json=body).raise_for_status().json()
    found: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


@dataclass(frozen=True)
class Api:
    """One endpoint of one server, greedy and short unless told otherwise."""

    http: httpx.Client
    path: str

    def body(self, prompt: str = "The capital of France is", tokens: int = 8, **more: Any) -> dict[str, Any]:
        given = {
            COMPLETIONS: {"prompt": prompt, "max_tokens": tokens},
            CHAT: {"messages": [{"role": "user", "content": prompt}], "max_tokens": tokens},
            RESPONSES: {"input": prompt, "max_output_tokens": tokens},
        }[self.path]
        # None in ``more`` takes a field out.
        merged = {"model": "demo", "temperature": 0} | given | more
        return {name: value for name, value in merged.items() if value is not None}

    def post(self, **more: Any) -> httpx.Response:
        return self.http.post(self.path, json=self.body(**more))

    def ask(self, **more: Any) -> Answer:
        response = self.post(**more)
        assert response.status_code == 200, response.text
        return self.read(response.json())

    def read(self, document: dict[str, Any]) -> Answer:
        usage = document["usage"]
        if self.path == RESPONSES:
            text = "".join(part["text"] for item in document["output"] for part in item["content"])
            finish = "length" if document["status"] == "incomplete" else "stop"
            return Answer(
                [text], [finish], usage["input_tokens"], usage["output_tokens"],
                usage["input_tokens_details"]["cached_tokens"], document,
            )  # fmt: skip
        choices = sorted(document["choices"], key=lambda choice: choice["index"])
        texts = [c["text"] if self.path == COMPLETIONS else c["message"]["content"] for c in choices]
        return Answer(
            texts, [choice["finish_reason"] for choice in choices], usage["prompt_tokens"],
            usage["completion_tokens"], usage["prompt_tokens_details"]["cached_tokens"], document,
        )  # fmt: skip

    def events(self, **more: Any) -> list[dict[str, Any]]:
        text = self.post(stream=True, **more).text
        lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")]
        return [json.loads(line) for line in lines]

    def streamed(self, **more: Any) -> str:
        parts = []
        for event in self.events(**more):
            if self.path == RESPONSES:
                parts += [event["delta"]] if event["type"] == "response.output_text.delta" else []
            else:
                for choice in event["choices"]:
                    parts += [
                        choice["text"] if self.path == COMPLETIONS else choice["delta"].get("content", "")
                    ]
        return "".join(parts)

    def tokens(self, **more: Any) -> int:
        return int(self.http.post("/tokenize", json=more).json()["count"])
