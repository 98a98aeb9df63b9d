"""POST /tokenize and /detokenize, with the request and response bodies of vLLM's API."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence, Sized
from typing import TypeVar

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field
from pydantic_core import to_json
from starlette.responses import Response

from tonnage.server.api.body import Fields, openapi_body, read_fields
from tonnage.server.api.chat.prompt import chat_prompt
from tonnage.server.api.chat.protocol import Messages
from tonnage.server.api.fields import FieldRule, Standing
from tonnage.server.api.generation import Generator
from tonnage.server.api.sampling import StrictModel, TokenId
from tonnage.server.errors import ApiError, ErrorCode, invalid_value
from tonnage.server.http.bodies import FREE_BYTES
from tonnage.server.state import ServerState

# Limits of a request: bytes of the text to encode, and number of token ids to decode. A model with a larger
# context raises them. Encoding takes about a hundred times the text's bytes in memory, and twice that when the
# text of each token is returned.
MAX_BYTES = 2**18
MAX_TOKENS = 2**17
_WRITTEN_AT_ONCE = 2**14
# Bytes per token by which the context length in tokens is converted to bytes; English text has four to five.
_BYTES_A_TOKEN = 8


class _Named(StrictModel):
    model: str | None = None


class TokenizeRequest(_Named):
    """Body of POST /tokenize: a text, or a conversation to which the chat template is applied."""

    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(_Named):
    """Body of POST /detokenize: the token ids to convert to text."""

    tokens: list[TokenId] = Field(fail_fast=True)


Body = TypeVar("Body", TokenizeRequest, DetokenizeRequest)


class Tokens(BaseModel):
    """Answer of /tokenize: the token ids of a text, their number, and the model's context length."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Text(BaseModel):
    """Answer of /detokenize: the text of the token ids."""

    prompt: str


def _fields(model: type[Body]) -> Fields[Body]:
    return Fields(model, {name: FieldRule(Standing.HONOURED) for name in model.model_fields})


_TOKENIZE, _DETOKENIZE = _fields(TokenizeRequest), _fields(DetokenizeRequest)


async def _written(items: Sequence[int | str]) -> list[bytes]:
    """Serialize a list to JSON in slices, and let the event loop run other tasks between two slices."""
    parts = []
    for at in range(0, len(items), _WRITTEN_AT_ONCE):
        parts += [b",", to_json(items[at : at + _WRITTEN_AT_ONCE])[1:-1]]
        await asyncio.sleep(0)
    return [b"[", *parts[1:], b"]"]


def tokenize_router(state: ServerState, generator: Generator) -> APIRouter:
    """Return the routes of /tokenize and /detokenize."""
    router = APIRouter()
    # A large answer takes up to a hundred megabytes while it is written, so only one is written at a time.
    one_large = asyncio.Lock()

    async def parse(request: Request, fields: Fields[Body]) -> tuple[Body, int]:
        """Return the validated body of a request and the body's size in bytes."""
        body, _, size = await read_fields(request, state, fields)
        if body.model is not None:
            state.check_model(body.model)
        return body, size

    def check_length(param: str, value: Sized, what: str, least: int, of_a_token: int) -> None:
        most = max(least, of_a_token * state.max_model_len)
        if len(value) > most:
            raise invalid_value(f"{param} has {len(value)} {what}; at most {most} are allowed at once", param)

    @router.post("/tokenize", openapi_extra=openapi_body(_TOKENIZE), response_model=Tokens)
    async def tokenize(request: Request) -> Response:
        """Return the token ids of a prompt or a conversation, as the generating endpoints would encode it."""
        body, size = await parse(request, _TOKENIZE)
        async with one_large if size > FREE_BYTES else contextlib.nullcontext():
            return await answer(body)

    async def answer(body: TokenizeRequest) -> Response:
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(ErrorCode.MISSING_PARAMETER, "you must provide prompt or messages", param="prompt")
        if body.messages is not None:
            ids = await chat_prompt(
                state,
                generator,
                body.messages,
                add_generation_prompt=body.add_generation_prompt is not False,
                add_special_tokens=bool(body.add_special_tokens),
            )
        else:
            text = (body.prompt or "").encode()
            check_length("prompt", text, "bytes of UTF-8", MAX_BYTES, _BYTES_A_TOKEN)
            ids = await generator.encode(
                body.prompt or "", add_special_tokens=body.add_special_tokens is not False
            )
        # The answer is serialized in slices, because FastAPI would write all tokens at once and block the event
        # loop.
        parts = [b'{"count":%d,"max_model_len":%d,"tokens":' % (len(ids), state.max_model_len)]
        parts += await _written(ids)
        if body.return_token_strs:
            parts += [b',"token_strs":', *await _written(await generator.token_texts(ids))]
        return Response(b"".join([*parts, b"}"]), media_type="application/json")

    @router.post("/detokenize", openapi_extra=openapi_body(_DETOKENIZE))
    async def detokenize(request: Request) -> Text:
        """Return the text that the token ids in the request decode to."""
        body, _ = await parse(request, _DETOKENIZE)
        check_length("tokens", body.tokens, "tokens", MAX_TOKENS, 1)
        if body.tokens:
            generator.check_token_ids([body.tokens], "tokens")
        return Text(prompt=await asyncio.to_thread(state.tokenizer.decode_without_gil, body.tokens))

    return router
