"""Token ids and prompt log probabilities in answers: vLLM's ``return_token_ids`` and ``prompt_logprobs``."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import BaseModel, Field

from tonnage.server.api.generation import Delta
from tonnage.server.api.logprobs import filled, finite
from tonnage.server.api.sampling import MAX_TOP_LOGPROBS, SamplingFields
from tonnage.server.engines.chunk import TokenLogprobs
from tonnage.server.errors import invalid_value
from tonnage.server.http.outbox import HeldAnswer
from tonnage.server.requests.submission import Submission
from tonnage.server.state import ServerState
from tonnage.server.text.tokenizer import Tokenizer

# Number of prompt positions that are written as JSON before the event loop runs other tasks. A position has at
# most 21 tokens, so this takes about two milliseconds.
_POSITIONS_AT_ONCE = 64
_NO_SCORES = '"prompt_logprobs":[]'


class TokenOutputFields(SamplingFields):
    """Base class of the request bodies that can ask for token ids and prompt log probabilities."""

    return_token_ids: bool | None = None
    prompt_logprobs: int | None = Field(
        None, ge=0, le=MAX_TOP_LOGPROBS, description="alternatives per prompt token; without stream"
    )


class PromptLogprob(BaseModel):
    """Log probability of a token at a position of the prompt, with its rank (1: the likeliest)."""

    logprob: float
    rank: int | None = None
    decoded_token: str


# ``prompt_logprobs`` of an answer: per prompt token a dict, whose keys are token ids; null for the first token
PromptScores = list[dict[str, PromptLogprob] | None]


def is_none(value: Any) -> bool:
    """Return whether a field of an answer is None and is therefore left out of its JSON."""
    return value is None


def check_prompt_logprobs(request: TokenOutputFields) -> None:
    """Raise ApiError when a streamed request asks for prompt log probabilities, as vLLM does."""
    if request.prompt_logprobs is not None and request.stream:
        raise invalid_value(
            "prompt_logprobs are not available with stream: true; leave one of them out", "prompt_logprobs"
        )


class TokenOutput:
    """The token ids and prompt log probabilities of one answer, collected while it is generated.

    ``held`` counts their bytes together with the other bytes of the answer.

    Args:
        state: The server's state.
        request: The request.
        submission: The prompts and parameters that the request submits to the engine.
        held: Counter of the bytes that the answer holds in memory.
        hides_tokens: Whether the answer leaves out its token ids, because they show reasoning that is hidden.
    """

    def __init__(
        self,
        state: ServerState,
        request: TokenOutputFields,
        submission: Submission,
        held: HeldAnswer,
        *,
        hides_tokens: bool,
    ) -> None:
        self._tokenizer = state.tokenizer
        self._top = request.prompt_logprobs
        self._prompts, self._n = submission.prompts, submission.n
        self._held = held
        self._shows_prompt = bool(request.return_token_ids)
        self._shows_tokens = self._shows_prompt and not hides_tokens
        self._ids: list[list[int]] = [[] for _ in range(submission.sequences)]
        # index of a prompt -> JSON of its log probabilities
        self._scores: dict[int, str] = {}

        # upper bound of the bytes of a token id in JSON
        self._id_bytes = len(str(state.plan.model.vocab_size)) + 1
        if self._shows_prompt:
            held.hold(self._id_bytes * self._n * sum(map(len, submission.prompts)))

    async def take(self, delta: Delta) -> None:
        """Add the token ids and prompt log probabilities of ``delta``, a choice's newest tokens, to the answer.

        Raises:
            ApiError: The answer is too large.
        """
        if self._shows_tokens:
            self._ids[delta.index] += delta.token_ids
            self._held.hold(self._id_bytes * len(delta.token_ids))
        prompt = delta.index // self._n
        if self._top is None or not delta.prompt_logprobs or prompt in self._scores:
            return
        parts: list[str] = []
        for at in range(0, len(delta.prompt_logprobs), _POSITIONS_AT_ONCE):
            positions = delta.prompt_logprobs[at : at + _POSITIONS_AT_ONCE]
            parts.append(",".join(_position(each, self._tokenizer, self._top) for each in positions))
            self._held.hold(len(parts[-1]) * self._n)
            await asyncio.sleep(0)
        self._scores[prompt] = ",".join(parts)

    def token_ids(self, index: int) -> list[int] | None:
        """Return the token ids of a choice, or None if the request does not ask for them."""
        return self._ids[index] if self._shows_tokens else None

    def prompt_token_ids(self, prompt: int) -> list[int] | None:
        """Return the token ids of a prompt, or None if the request does not ask for them."""
        return list(self._prompts[prompt]) if self._shows_prompt else None

    def scores(self) -> PromptScores | None:
        """Return a placeholder that `fill` replaces by a prompt's log probabilities; None if not requested."""
        return None if self._top is None else []

    def fill(self, answer: str, prompts: Iterable[int]) -> str:
        """Return ``answer``, JSON text, with each placeholder replaced by a prompt's log probabilities.

        The method `scores` wrote the placeholders. ``prompts`` has, for each placeholder in order, the index
        of the prompt whose log probabilities replace it.
        """
        if self._top is None:
            return answer
        lists = [f'"prompt_logprobs":[{self._scores.get(prompt, "")}]' for prompt in prompts]
        return filled(answer, _NO_SCORES, lists)


def _position(token: TokenLogprobs | None, tokenizer: Tokenizer, top: int) -> str:
    """Return one prompt position's log probabilities as vLLM's JSON: its token, then the ``top`` likeliest."""
    if token is None:
        return "null"
    ranked = enumerate(token.top[:top], start=1)
    listed = {token.token_id: (token.logprob, token.rank)}
    listed |= {token_id: (logprob, rank) for rank, (token_id, logprob) in ranked if token_id not in listed}
    return json.dumps(
        {
            str(token_id): {
                "logprob": finite(logprob),
                "rank": rank,
                "decoded_token": tokenizer.token_text(token_id),
            }
            for token_id, (logprob, rank) in listed.items()
        },
        separators=(",", ":"),
    )


def ids_member(name: str, token_ids: Sequence[int]) -> bytes:
    """Return the JSON member ``name`` with a list of token ids as its value, and with a comma before it."""
    return b',"%b":[%b]' % (name.encode(), ",".join(map(str, token_ids)).encode())
