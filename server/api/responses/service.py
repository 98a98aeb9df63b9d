"""Logic of /v1/responses without HTTP code: it turns a request into a response or its events."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import pydantic_core

from tonnage.server.api.chat.prompt import chat_prompt, earlier_calls
from tonnage.server.api.chat.protocol import FunctionCall, Message, RefusalPart, ToolCall
from tonnage.server.api.completions.service import outcome_of_finishes
from tonnage.server.api.endpoint import StreamingService
from tonnage.server.api.generation import Finish, Generator
from tonnage.server.api.responses import output
from tonnage.server.api.responses.protocol import (
    FIELDS,
    AllowedFunctionTools,
    FunctionCallItem,
    FunctionCallOutput,
    InputText,
    NamedFunctionTool,
    ReasoningItem,
    ResponseRequest,
    TextOptions,
)
from tonnage.server.api.sampling import check_stream_options
from tonnage.server.api.tools import allowed_tools, submission_with_tools, tool_use
from tonnage.server.errors import ApiError, envelope, invalid_value, unsupported_parameter
from tonnage.server.requests.accounts import Ticket
from tonnage.server.requests.submission import Submission, TokenCounts
from tonnage.server.state import ServerState
from tonnage.server.text.tool_calls import CallDelta, ToolDict, ToolUse, calls_of


@dataclass(frozen=True, slots=True)
class _Stream:
    """The state of a streamed response: the writer of its events, and the response object at its start.

    The event that reports a failure needs both.
    """

    events: output.OutputEvents
    response: dict[str, Any]


class ResponseService(StreamingService[ResponseRequest]):
    """Logic of the responses endpoint; its methods may raise ApiError or the engine's TonnageErrors."""

    fields = FIELDS
    # Empty, because the service itself sends the event that ends a stream: response.completed,
    # response.incomplete or response.failed.
    last_event = b""

    def __init__(self, state: ServerState, generator: Generator) -> None:
        super().__init__(state, generator)
        self._streams: WeakKeyDictionary[Ticket, _Stream] = WeakKeyDictionary()

    def error_event(self, error: ApiError, ticket: Ticket) -> bytes:
        """Return the ``error`` event, followed by ``response.failed`` when the response has begun.

        The event has the error's fields in two places. OpenAI's reference defines them at the top level.
        OpenAI's servers and Open Responses (ErrorStreamingEvent, 2026-04-24) have them under ``error``, where
        openai's client reads them.
        """
        begun = self._streams.get(ticket)
        events = begun.events if begun else output.OutputEvents(ticket.request_id)
        body = envelope(error)["error"]
        flat = {name: body[name] for name in ("code", "message", "param")}
        data = events.numbered_event("error", **flat, error=body)
        if begun is None:
            return data
        # ``server_error`` stands for all of this server's codes: OpenAI's list of codes for failed responses
        # has none of them.
        failure = {"code": "server_error", "message": body["message"]}
        response = begun.response | {"status": "failed", "error": failure, "output": events.items}
        return data + events.numbered_event("response.failed", response=response)

    async def complete(self, request: ResponseRequest, ticket: Ticket) -> bytes:
        """Return the complete response as JSON; cancelling the call aborts the request."""
        submission, use, repeated = await self._prepare(request)
        counts = TokenCounts()
        (text, calls, thought), last = await self._generator.whole_answer(submission, use, counts, ticket)
        finish = last.finish_reason or "stop"
        ticket.finish(outcome_of_finishes([finish]))
        response = self._response(request, ticket, submission, repeated)
        shown = "" if request.include_reasoning is False else thought
        found = output.items(ticket.request_id, text, calls_of(calls), _status(finish), shown)
        return json.dumps(_finished(response, found, finish, counts)).encode()

    async def stream(self, request: ResponseRequest, ticket: Ticket) -> AsyncGenerator[bytes, None]:
        """Yield the server-sent events of a response; closing the iterator aborts the request."""
        submission, use, repeated = await self._prepare(request)
        reader = None if use.reader is None else use.reader(submission.prompts[0])
        counts = TokenCounts()
        finish: Finish = "stop"
        events = output.OutputEvents(ticket.request_id)
        response: dict[str, Any] = {}
        async with aclosing(self._generator.run(submission, counts, ticket)) as deltas:
            async for delta in deltas:
                data = b""
                if not response:
                    response = self._response(request, ticket, submission, repeated)
                    self._streams[ticket] = _Stream(events, response)
                    data += events.numbered_event("response.created", response=response)
                    data += events.numbered_event("response.in_progress", response=response)
                text = delta.text
                calls: Sequence[CallDelta] = ()
                finish = delta.finish_reason or finish
                if reader is not None:
                    text, calls, thought = reader.push(
                        text, delta.token_ids, finished=delta.finish_reason is not None
                    )
                    counts.reasoning = reader.reasoning_tokens
                    if thought and request.include_reasoning is not False:
                        data += events.reasoning(thought)
                if text or reader is None:
                    data += events.text(text)
                for call in calls:
                    data += events.call(call)
                if data:
                    yield data
        ticket.finish(outcome_of_finishes([finish]))
        data = events.close(_status(finish))
        # The model generated nothing, or nothing but reasoning: send an empty message.
        if all(item["type"] == "reasoning" for item in events.items):
            data = events.text("") + events.close(_status(finish))
        done = _finished(response, events.items, finish, counts)
        yield data + events.numbered_event(f"response.{done['status']}", response=done)

    async def _prepare(self, request: ResponseRequest) -> tuple[Submission, ToolUse, bytes]:
        """Return what a request submits to the engine, how it uses tools, and the fields its response repeats.

        The fields are JSON text. A waiting request keeps only these three results; its parsed body is freed.
        """
        state, generator = self._state, self._generator
        lora = state.check_model(request.model)
        state.check_task()
        check_stream_options(request)
        messages = await generator.converted(request.items(), _messages, request)
        use = await generator.converted(request.items(), self._tools, request, messages)
        repeated = self._repeated(request)
        state.check_ready()
        prompt = await chat_prompt(
            state,
            generator,
            messages,
            template_arguments=request.template_arguments(),
            tools=use.shown,
            add_special_tokens=bool(request.add_special_tokens),
            param="input",
        )
        prompt = generator.truncated(prompt, request.truncate_prompt_tokens, request.max_output_tokens)
        max_tokens = generator.max_tokens(
            request.max_output_tokens,
            len(prompt),
            default=state.settings.default_chat_max_tokens,
            param="max_output_tokens",
            prompt="input",
        )
        params = request.sampling(max_tokens, state.tokenizer.eos_token_ids, state.plan.model.vocab_size)
        submission = submission_with_tools(request, prompt, params, use, lora, field="input")
        request.input = ""
        request.forget()
        return submission, replace(use, shown=()), repeated

    def _repeated(self, request: ResponseRequest) -> bytes:
        """Return the JSON of the fields of a request that its response repeats.

        Raises:
            ApiError: The fields are too large.
        """
        limit = self._generator.ordinary_bytes
        repeated = pydantic_core.to_json(
            {
                "instructions": request.instructions,
                "metadata": request.metadata or {},
                "text": _shown_text(request.text),
                "tools": [tool.model_dump() for tool in request.tools or ()],
            }
        )
        if len(repeated) > limit:
            raise invalid_value(
                f"instructions, metadata, text and tools, which a response repeats, have {len(repeated):,} "
                f"bytes as JSON; at most {limit:,} are allowed",
                "tools" if request.tools else "instructions",
            )
        return repeated

    def _tools(self, request: ResponseRequest, messages: Sequence[Message]) -> ToolUse:
        choice = request.tool_choice
        tools: list[ToolDict] = [tool.for_template() for tool in request.tools or ()]
        if isinstance(choice, AllowedFunctionTools):
            tools = allowed_tools(tools, [tool.name for tool in choice.tools])
            choice = choice.mode
        return tool_use(
            self._state,
            tools,
            choice if isinstance(choice, str) else None,
            function=choice.name if isinstance(choice, NamedFunctionTool) else None,
            parallel=request.parallel_tool_calls is not False,
            messages=earlier_calls(messages) if tools else (),
            grammar=request.grammar(),
            template_arguments=request.template_arguments(),
        )

    def _response(
        self, request: ResponseRequest, ticket: Ticket, submission: Submission, repeated: bytes
    ) -> dict[str, Any]:
        """Return the response object before its first token, with every field of Open Responses.

        A field that is accepted without effect has the value that says so, such as false for ``store``.
        """
        params = submission.params
        members: dict[str, Any] = pydantic_core.from_json(repeated)
        return members | {
            "id": f"resp_{ticket.request_id}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "background": False,
            "completed_at": None,
            "error": None,
            "frequency_penalty": params.frequency_penalty,
            "incomplete_details": None,
            "max_output_tokens": request.max_output_tokens,
            "max_tool_calls": None,
            "model": request.model,
            "output": [],
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "presence_penalty": params.presence_penalty,
            "previous_response_id": None,
            "prompt_cache_key": None,
            "reasoning": {
                "effort": request.reasoning.effort if request.reasoning else None,
                "summary": None,
            },
            "safety_identifier": None,
            "service_tier": "default",
            "store": False,
            "temperature": params.temperature,
            "tool_choice": pydantic_core.to_jsonable_python(request.tool_choice or "auto"),
            "top_logprobs": 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": None,
        }


def _messages(request: ResponseRequest) -> list[Message]:
    """Return the conversation of a request as chat messages; all calls of one turn go into one message."""
    messages = [Message(role="system", content=request.instructions)] if request.instructions else []
    if isinstance(request.input, str):
        return [*messages, Message(role="user", content=request.input)]
    thought: str | None = None  # reasoning that belongs to the assistant's next message or call
    for at, item in enumerate(request.input):
        if isinstance(item, ReasoningItem):
            thought = "".join(part.text for part in item.content or ()) or None
            continue
        if isinstance(item, FunctionCallOutput):
            messages.append(Message(role="tool", content=_text(item.output), tool_call_id=item.call_id))
        elif isinstance(item, FunctionCallItem):
            function = FunctionCall(name=item.name, arguments=item.arguments)
            call = ToolCall(id=item.call_id, type="function", function=function)
            if thought is not None or not messages or messages[-1].role != "assistant":
                messages.append(Message(role="assistant", reasoning=thought))
            before = messages[-1]
            # Calls are appended to the message's own list, because copying it per call would be quadratic.
            before.tool_calls = before.tool_calls or []
            before.tool_calls.append(call)
        elif item.role == "assistant":
            messages.append(Message(role="assistant", content=_text(item.content), reasoning=thought))
        elif any(isinstance(part, RefusalPart) for part in item.content):
            raise unsupported_parameter(
                f"input.{at}.content: a message of the role {item.role} may have no refusal parts; "
                "send text parts",
                f"input.{at}.content",
            )
        else:
            messages.append(Message(role=item.role, content=_text(item.content)))
        thought = None
    return messages


def _text(content: str | Sequence[InputText | RefusalPart]) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.refusal if isinstance(part, RefusalPart) else part.text for part in content)


def _shown_text(text: TextOptions | None) -> dict[str, Any]:
    shown: dict[str, Any] = {} if text is None else text.model_dump(by_alias=True, exclude_none=True)
    # The response repeats the request's ``format``. ``strict`` is true unless the request sets it, because the
    # answer always matches the schema.
    if shown.get("format", {}).get("type") == "json_schema":
        shown["format"] = {"description": None, "schema": {}, "strict": True} | shown["format"]
    return {"format": {"type": "text"}} | shown


def _status(finish: Finish) -> str:
    """Return the status of a response and of its last item.

    It is ``incomplete`` when max_output_tokens cut the answer off, else ``completed``.
    """
    return "incomplete" if finish == "length" else "completed"


def _finished(
    response: dict[str, Any], found: list[dict[str, Any]], finish: Finish, counts: TokenCounts
) -> dict[str, Any]:
    """Return ``response`` with status, output items and token usage filled in."""
    return response | {
        "status": _status(finish),
        "completed_at": None if finish == "length" else int(time.time()),
        "incomplete_details": {"reason": "max_output_tokens"} if finish == "length" else None,
        "output": found,
        "usage": {
            "input_tokens": counts.prompt,
            "input_tokens_details": {"cached_tokens": counts.cached_total, "cache_write_tokens": 0},
            "output_tokens": counts.completion,
            "output_tokens_details": {"reasoning_tokens": counts.reasoning or 0},
            "total_tokens": counts.prompt + counts.completion,
        },
    }
