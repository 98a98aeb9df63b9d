"""Logic of /v1/messages without HTTP code: it turns a request to Anthropic's API into a message or events."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from tonnage.server.api.chat.service import ChatService
from tonnage.server.api.completions.service import outcome_of_finishes
from tonnage.server.api.endpoint import StreamingService
from tonnage.server.api.generation import Delta, Finish, Generator
from tonnage.server.api.messages import output
from tonnage.server.api.messages.conversion import blocks_of, chat_request
from tonnage.server.api.messages.protocol import FIELDS, MessagesRequest
from tonnage.server.api.sse import event
from tonnage.server.errors import ApiError, anthropic_envelope
from tonnage.server.requests.accounts import Ticket
from tonnage.server.requests.submission import Submission, TokenCounts
from tonnage.server.state import ServerState
from tonnage.server.text.tool_calls import CallDelta, ToolUse, calls_of


class MessagesService(StreamingService[MessagesRequest]):
    """Logic of Anthropic's messages endpoint; its methods may raise ApiError or the engine's TonnageErrors."""

    fields = FIELDS
    # No event is added at the end of a stream, because the service itself sends message_stop, which ends it.
    last_event = b""

    def __init__(self, state: ServerState, generator: Generator) -> None:
        super().__init__(state, generator)
        self._chat = ChatService(state, generator)

    def error_event(self, error: ApiError, ticket: Ticket) -> bytes:
        """Return Anthropic's error event."""
        return event(anthropic_envelope(error, ticket.request_id))

    async def complete(self, request: MessagesRequest, ticket: Ticket) -> bytes:
        """Return the complete message as JSON; cancelling the call aborts the request."""
        submission, use = await self._prepare(request)
        counts = TokenCounts()
        (text, deltas, thought), last = await self._generator.whole_answer(submission, use, counts, ticket)
        calls = calls_of(deltas)
        ticket.finish(outcome_of_finishes([last.finish_reason]))
        answer = output.message(ticket.request_id, request.model, counts) | _ending(
            request, last, counts, called=bool(calls)
        )
        answer["content"] = output.blocks(text, calls, thought)
        return json.dumps(answer).encode()

    async def stream(self, request: MessagesRequest, ticket: Ticket) -> AsyncGenerator[bytes, None]:
        """Yield the server-sent events of a message; closing the iterator aborts the request."""
        submission, use = await self._prepare(request)
        reader = None if use.reader is None else use.reader(submission.prompts[0])
        counts = TokenCounts()
        events = output.MessageEvents()
        finishes: list[Finish | None] = []
        begun = called = False
        async with aclosing(self._generator.run(submission, counts, ticket)) as deltas:
            async for delta in deltas:
                data = b""
                if not begun:
                    begun = True
                    message = output.message(ticket.request_id, request.model, counts)
                    data += event({"type": "message_start", "message": message})
                text = delta.text
                calls: Sequence[CallDelta] = ()
                if reader is not None:
                    text, calls, thought = reader.push(
                        text, delta.token_ids, finished=delta.finish_reason is not None
                    )
                    counts.reasoning = reader.reasoning_tokens if use.reasons else None
                    if thought:
                        data += events.thinking(thought)
                if text:
                    data += events.text(text)
                for call in calls:
                    called = True
                    data += events.call(call)
                if delta.finish_reason is not None:
                    finishes.append(delta.finish_reason)
                    data += events.close()
                    ending = _ending(request, delta, counts, called=called)
                    changes = {"type": "message_delta", "delta": ending, "usage": output.usage(counts)}
                    data += event(changes) + event({"type": "message_stop"})
                if data:
                    yield data
        ticket.finish(outcome_of_finishes(finishes))

    async def _prepare(self, request: MessagesRequest) -> tuple[Submission, ToolUse]:
        # Clients of this API often send a max_tokens larger than the context. Such a request is not rejected:
        # its answer may end at the end of the context, as in Anthropic's API.
        chat = await self._generator.converted(blocks_of(request), chat_request, request)
        # a waiting request keeps only its token ids; the messages they were made from are freed
        request.messages, request.system, request.tools = [], None, None
        request.chat_template_kwargs = request.output_config = None
        return await self._chat.prepare(chat, default_max_tokens=request.max_tokens)


def _ending(
    request: MessagesRequest, last: Delta, counts: TokenCounts, *, called: bool
) -> dict[str, str | None]:
    """Return the reason why an answer ended, and the stop sequence that ended it."""
    reason: str
    if last.finish_reason == "length":
        cut = counts.completion >= request.max_tokens
        reason = "max_tokens" if cut else "model_context_window_exceeded"
    elif last.stop_string is not None:
        reason = "stop_sequence"
    else:
        reason = "tool_use" if called else "end_turn"
    return {"stop_reason": reason, "stop_sequence": last.stop_string}
