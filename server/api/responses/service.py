"""/v1/responses without HTTP: a request in, a response or its events out."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from tonnage.server.accounts import Ticket
from tonnage.server.api.chat.prompt import chat_prompt
from tonnage.server.api.chat.protocol import Message
from tonnage.server.api.completions.service import outcome_of_finishes
from tonnage.server.api.generation import Finish, Generator, Submission, TokenCounts
from tonnage.server.api.responses.protocol import FIELDS, InputMessage, ResponseRequest
from tonnage.server.errors import ApiError, ErrorCode
from tonnage.server.state import ServerState


class ResponseService:
    """Answers of one app. Every method raises ApiError or the engine's TonnageErrors."""

    fields = FIELDS
    last_event = b""  # response.completed (incomplete, failed) is the end

    def __init__(self, state: ServerState, generator: Generator) -> None:
        self._state = state
        self._generator = generator

    def error_event(self, error: ApiError) -> bytes:
        """OpenAI's ``error`` event. Its number is not known here: events after it there are none."""
        event = {
            "type": "error",
            "sequence_number": 0,
            "code": error.code.value,
            "message": error.message,
            "param": error.param,
        }
        return _event(event)

    async def complete(self, request: ResponseRequest, ticket: Ticket) -> bytes:
        """The whole answer. Cancelling the call aborts the request."""
        submission = await self._prepare(request)
        counts, text = TokenCounts(), ""
        finish: Finish = "stop"
        async with aclosing(self._generator.run(submission, counts, ticket)) as deltas:
            async for delta in deltas:
                text += delta.text
                finish = delta.finish_reason or finish
        ticket.finish(outcome_of_finishes([finish]))
        response = self._response(request, ticket, submission)
        return json.dumps(_finished(response, ticket, text, finish, counts)).encode()

    async def stream(self, request: ResponseRequest, ticket: Ticket) -> AsyncGenerator[bytes, None]:
        """The events of a text answer; closing the iterator aborts the request."""
        submission = await self._prepare(request)
        counts, text = TokenCounts(), ""
        finish: Finish = "stop"
        number = 0
        response = self._response(request, ticket, submission)
        item_id = f"msg_{ticket.request_id}"
        place: dict[str, Any] = {"item_id": item_id, "output_index": 0, "content_index": 0}

        def event(kind: str, **fields: Any) -> bytes:
            nonlocal number
            number += 1
            return _event({"type": kind, "sequence_number": number - 1, **fields})

        async with aclosing(self._generator.run(submission, counts, ticket)) as deltas:
            begun = False
            async for delta in deltas:
                told = b""
                if not begun:
                    begun = True
                    told += event("response.created", response=response)
                    told += event("response.in_progress", response=response)
                    item = _message(item_id, None, "in_progress")
                    told += event("response.output_item.added", output_index=0, item=item)
                    told += event("response.content_part.added", **place, part=_part(""))
                if delta.text:
                    text += delta.text
                    told += event("response.output_text.delta", **place, delta=delta.text, logprobs=[])
                finish = delta.finish_reason or finish
                if told:
                    yield told
        ticket.finish(outcome_of_finishes([finish]))
        done = _finished(response, ticket, text, finish, counts)
        told = event("response.output_text.done", **place, text=text, logprobs=[])
        told += event("response.content_part.done", **place, part=_part(text))
        told += event("response.output_item.done", output_index=0, item=done["output"][0])
        yield told + event(f"response.{done['status']}", response=done)

    async def _prepare(self, request: ResponseRequest) -> Submission:
        state, generator = self._state, self._generator
        lora = state.check_model(request.model)
        state.check_task()
        if request.stream_options is not None and not request.stream:
            raise ApiError(
                ErrorCode.INVALID_VALUE,
                "stream_options is only allowed with stream: true",
                param="stream_options",
            )
        state.check_ready()
        prompt = await chat_prompt(
            state,
            generator,
            _messages(request),
            template_arguments=request.chat_template_kwargs,
            add_special_tokens=bool(request.add_special_tokens),
            param="input",
        )
        max_tokens = generator.max_tokens(
            request.max_output_tokens,
            len(prompt),
            default=state.settings.default_chat_max_tokens,
            param="max_output_tokens",
        )
        params = request.sampling(max_tokens, state.tokenizer.eos_token_ids, state.plan.model.vocab_size)
        return Submission(
            (prompt,), params, 1, request.stop_strings(), request.cache_salt or "", request.priority, lora=lora
        )

    def _response(self, request: ResponseRequest, ticket: Ticket, submission: Submission) -> dict[str, Any]:
        """The response object before its first token."""
        params = submission.params
        return {
            "id": f"resp_{ticket.request_id}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "model": request.model,
            "output": [],
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "temperature": params.temperature,
            "text": {"format": {"type": "text"}} if request.text is None else _shown_text(request),
            "tool_choice": "auto",
            "tools": [],
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": None,
        }


def _messages(request: ResponseRequest) -> list[Message]:
    messages = [Message(role="system", content=request.instructions)] if request.instructions else []
    if isinstance(request.input, str):
        return [*messages, Message(role="user", content=request.input)]
    return messages + [Message(role=item.role, content=_text(item)) for item in request.input]


def _text(item: InputMessage) -> str:
    if isinstance(item.content, str):
        return item.content
    return "".join(part.text for part in item.content)


def _shown_text(request: ResponseRequest) -> dict[str, Any]:
    assert request.text is not None
    shown: dict[str, Any] = request.text.model_dump(by_alias=True, exclude_none=True)
    return {"format": {"type": "text"}} | shown


def _finished(
    response: dict[str, Any], ticket: Ticket, text: str, finish: Finish, counts: TokenCounts
) -> dict[str, Any]:
    """``response`` with its output and usage; cut off by max_output_tokens it is ``incomplete``."""
    status = "incomplete" if finish == "length" else "completed"
    return response | {
        "status": status,
        "incomplete_details": {"reason": "max_output_tokens"} if finish == "length" else None,
        "output": [_message(f"msg_{ticket.request_id}", text, status)],
        "usage": {
            "input_tokens": counts.prompt,
            "input_tokens_details": {"cached_tokens": counts.cached_total, "cache_write_tokens": 0},
            "output_tokens": counts.completion,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": counts.prompt + counts.completion,
        },
    }


def _message(item_id: str, text: str | None, status: str) -> dict[str, Any]:
    content = [] if text is None else [_part(text)]
    return {"id": item_id, "type": "message", "role": "assistant", "status": status, "content": content}


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _event(event: dict[str, Any]) -> bytes:
    return f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode()
