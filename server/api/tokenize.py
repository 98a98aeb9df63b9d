"""POST /tokenize and /detokenize, in vLLM's shapes."""

from __future__ import annotations

import asyncio
from collections.abc import Sized
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field
from starlette.responses import Response

from tonnage.server.api.body import Fields, inline_schema, most_values, parse_body, read_body
from tonnage.server.api.chat.prompt import chat_prompt
from tonnage.server.api.chat.protocol import Messages
from tonnage.server.api.fields import FieldRule, Standing
from tonnage.server.api.generation import Generator
from tonnage.server.api.sampling import STRICT, TokenId
from tonnage.server.errors import ApiError, ErrorCode
from tonnage.server.state import ServerState

# What a text or a list may have, or what the context holds where that is more: a text takes some hundred bytes
# of memory a character while it is encoded, with its tokens' texts twice that.
MAX_CHARACTERS = 2**18
MAX_TOKENS = 2**17
# English has four to five.
_CHARACTERS_A_TOKEN = 8


class _Named(BaseModel):
    model_config = STRICT

    model: str | None = None


class TokenizeRequest(_Named):
    """A text, or a conversation as the chat template writes it."""

    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(_Named):
    tokens: list[TokenId] = Field(fail_fast=True)


Body = TypeVar("Body", TokenizeRequest, DetokenizeRequest)


class Tokens(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Text(BaseModel):
    prompt: str


def _fields(model: type[Body]) -> Fields[Body]:
    return Fields(model, {name: FieldRule(Standing.HONOURED) for name in model.model_fields})


_TOKENIZE, _DETOKENIZE = _fields(TokenizeRequest), _fields(DetokenizeRequest)


def _openapi(fields: Fields[Body]) -> dict[str, Any]:
    schema = inline_schema(fields)
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def tokenize_router(state: ServerState, generator: Generator) -> APIRouter:
    router = APIRouter()

    async def parse(request: Request, fields: Fields[Body]) -> Body:
        settings = state.settings
        raw = await read_body(request, settings.max_request_body_bytes, settings.body_timeout, state.bodies)
        body, _ = parse_body(raw, fields, lenient=settings.lenient, most=most_values(state.max_model_len))
        if body.model is not None:
            state.check_model(body.model)
        return body

    def check_length(param: str, value: Sized, what: str, least: int, of_a_token: int) -> None:
        most = max(least, of_a_token * state.max_model_len)
        if len(value) > most:
            raise ApiError(
                ErrorCode.INVALID_VALUE,
                f"{param} has {len(value)} {what}; at most {most} are allowed at once",
                param=param,
            )

    @router.post("/tokenize", openapi_extra=_openapi(_TOKENIZE), response_model=Tokens)
    async def tokenize(request: Request) -> Response:
        """Token ids of a prompt or a conversation, as the generating endpoints would see them."""
        body = await parse(request, _TOKENIZE)
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
            check_length("prompt", body.prompt or "", "characters", MAX_CHARACTERS, _CHARACTERS_A_TOKEN)
            ids = await generator.encode(
                body.prompt or "", add_special_tokens=body.add_special_tokens is not False
            )
        texts = await asyncio.to_thread(state.tokenizer.token_texts, ids) if body.return_token_strs else None
        answer = Tokens(count=len(ids), max_model_len=state.max_model_len, tokens=list(ids), token_strs=texts)
        # Written here: FastAPI would go through a million tokens by hand.
        return Response(answer.model_dump_json(exclude_none=True), media_type="application/json")

    @router.post("/detokenize", openapi_extra=_openapi(_DETOKENIZE))
    async def detokenize(request: Request) -> Text:
        """The text of token ids."""
        body = await parse(request, _DETOKENIZE)
        check_length("tokens", body.tokens, "tokens", MAX_TOKENS, 1)
        if body.tokens:
            generator.check_token_ids([body.tokens], "tokens")
        return Text(prompt=await asyncio.to_thread(state.tokenizer.decode_apart, body.tokens))

    return router
