"""Log probabilities in the two formats of OpenAI's API: chat completions and completions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tonnage.server.engines.chunk import TokenLogprobs
from tonnage.server.text.tokenizer import Tokenizer

# JSON has no infinity, so this value stands for minus infinity, as in vLLM's API. That is the log probability
# of a token that a grammar or a bias excludes.
LOWEST = -9999.0


def finite(logprob: float) -> float:
    """Return a log probability, or ``LOWEST`` for minus infinity, which JSON cannot represent."""
    return logprob if logprob > LOWEST else LOWEST


def chat_logprobs(tokens: Sequence[TokenLogprobs], tokenizer: Tokenizer, top: int) -> list[dict[str, Any]]:
    """Return ``choices[].logprobs.content`` of a chat completion, with ``top`` alternatives per token."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": tokenizer.token_text(token_id),
            "logprob": finite(logprob),
            "bytes": list(tokenizer.token_bytes(token_id)),
        }

    return [
        entry(token.token_id, token.logprob)
        | {"top_logprobs": [entry(token_id, logprob) for token_id, logprob in token.top[:top]]}
        for token in tokens
    ]


class CompletionLogprobs:
    """Builder of ``choices[].logprobs`` of one completion: parallel lists with one entry per token.

    ``text_offset`` is the position of each token's text, which continues from one call of ``take`` to the next.
    A special token that the text omits has no length.

    Args:
        tokenizer: The model's tokenizer.
        top: Number of alternatives per token.
        echo: The text of the prompt with which the answer begins; empty without ``echo``.
        special_tokens: Whether the text includes special tokens.
    """

    def __init__(self, tokenizer: Tokenizer, top: int, echo: str = "", *, special_tokens: bool = False) -> None:
        self._tokenizer = tokenizer
        self._top = top
        self._echo = echo
        self._special_tokens = special_tokens
        self._offset = 0

    def _shown_length(self, token_id: int, text: str) -> int:
        omitted = self._tokenizer.is_special(token_id) and not self._special_tokens
        # a prompt that is sent as text may contain the text of a special token
        return 0 if omitted and not self._echo.startswith(text, self._offset) else len(text)

    def take(self, tokens: Sequence[TokenLogprobs | None], ids: Sequence[int] = ()) -> dict[str, list[Any]]:
        """Return the lists for the next ``tokens`` of the completion.

        Args:
            tokens: Log probabilities; None for the first token of an echoed prompt, which has no prediction.
            ids: Token ids of the prompt, used where ``tokens`` has None.
        """
        lists: dict[str, list[Any]] = {name: [] for name in COMPLETION_LISTS}
        for at, token in enumerate(tokens):
            token_id = ids[at] if token is None else token.token_id
            text = self._tokenizer.token_text(token_id)
            lists["tokens"].append(text)
            lists["text_offset"].append(self._offset)
            self._offset += self._shown_length(token_id, text)
            if token is None:
                lists["token_logprobs"].append(None)
                lists["top_logprobs"].append(None)
                continue
            lists["token_logprobs"].append(finite(token.logprob))
            # The sampled token itself is always included, so a position has up to logprobs + 1 entries, as in
            # OpenAI's reference.
            listed = (*reversed(token.top[: self._top]), (token.token_id, token.logprob))
            best = {self._tokenizer.token_text(i): finite(p) for i, p in listed}
            lists["top_logprobs"].append(best)
        return lists


class JsonLists:
    """JSON text of parallel lists that grow while an answer is generated.

    Log probabilities are written as JSON as soon as their tokens arrive. Writing all of them at the end of a
    long answer would block the event loop for seconds. Python objects would take several times the memory of
    JSON.

    Args:
        names: Names of the lists.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._parts: dict[str, list[str]] = {name: [] for name in names}

    def add(self, lists: dict[str, list[Any]]) -> int:
        """Append ``lists`` (values by list name) to the JSON text; return the number of characters added."""
        size = 0
        for name, values in lists.items():
            if values:
                part = json.dumps(values, separators=(",", ":"))[1:-1]
                self._parts[name].append(part)
                size += len(part)
        return size

    def text(self, more: str = "") -> str:
        """Return the lists as one JSON object; ``more`` is the JSON of further members, or empty."""
        members = [f"{json.dumps(name)}:[{','.join(parts)}]" for name, parts in self._parts.items()]
        return "{" + ",".join([*members, *([more] if more else [])]) + "}"


CHAT_LISTS = ("content",)
COMPLETION_LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
_EMPTY = '"logprobs":null'


def with_logprobs(answer: str, lists: Sequence[str]) -> str:
    """Return the JSON of an answer with the log probabilities of its choices in place of their nulls.

    Args:
        answer: JSON of the answer, whose choices have null log probabilities.
        lists: JSON of each choice's log probabilities.
    """
    return filled(answer, _EMPTY, [f'"logprobs":{text}' for text in lists])


def filled(answer: str, empty: str, members: Sequence[str]) -> str:
    """Return the JSON of an answer with each occurrence of ``empty`` replaced by the next of ``members``.

    ``empty`` must contain quotes, like ``"logprobs":null``. It then cannot occur inside a JSON string, where
    quotes are escaped.
    """
    pieces = answer.split(empty)
    begun = [piece + member for piece, member in zip(pieces, members, strict=False)]
    return "".join([*begun, *pieces[len(members) :]])
