"""Logic of /v1/chat/completions without HTTP code: it turns a request into a completion or stream events."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, closing
from dataclasses import replace
from json.encoder import encode_basestring_ascii  # quotes a string as json.dumps does, with less overhead
from typing import Any, Literal

from tonnage.server.api.chat.prompt import chat_prompt, earlier_calls
from tonnage.server.api.chat.protocol import (
    FIELDS,
    AllowedToolsChoice,
    AssistantMessage,
    ChatChoice,
    ChatCompletion,
    ChatRequest,
    FunctionCall,
    NamedTool,
    ToolCall,
    ToolCallMessage,
)
from tonnage.server.api.completions.service import ChunkWriter, outcome_of_finishes, usage, usage_so_far
from tonnage.server.api.endpoint import StreamingService
from tonnage.server.api.generation import Finish
from tonnage.server.api.logprobs import CHAT_LISTS, JsonLists, chat_logprobs, with_logprobs
from tonnage.server.api.sampling import check_stream_options
from tonnage.server.api.token_output import TokenOutput, check_prompt_logprobs, ids_member
from tonnage.server.api.tools import allowed_tools, submission_with_tools, tool_use
from tonnage.server.errors import invalid_value
from tonnage.server.http.outbox import HeldAnswer
from tonnage.server.requests.accounts import Ticket
from tonnage.server.requests.submission import Submission, TokenCounts
from tonnage.server.text.tool_calls import CallDelta, ToolDict, ToolUse, calls_of, merged


class ChatService(StreamingService[ChatRequest]):
    """Logic of the chat completions endpoint; its methods may raise ApiError or the engine's TonnageErrors."""

    fields = FIELDS

    async def complete(self, request: ChatRequest, ticket: Ticket) -> bytes:
        """Return the complete chat completion as JSON; cancelling the call aborts the request."""
        submission, use = await self.prepare(request)
        counts = TokenCounts()
        texts = [""] * submission.n
        token_ids: list[list[int]] = [[] for _ in texts]
        lists = [JsonLists(CHAT_LISTS) for _ in texts]
        finishes: list[Finish | None] = [None for _ in texts]
        tokenizer, top = self._state.tokenizer, request.top_logprobs or 0
        deltas = self._generator.run(submission, counts, ticket)
        with closing(HeldAnswer(self._state.outboxes)) as held:
            hidden = _hides_tokens(request, use)
            output = TokenOutput(self._state, request, submission, held, hides_tokens=hidden)
            async with aclosing(deltas):
                async for delta in deltas:
                    await output.take(delta)
                    texts[delta.index] += delta.text
                    token_ids[delta.index] += delta.token_ids
                    finishes[delta.index] = delta.finish_reason or finishes[delta.index]
                    if request.logprobs:
                        content = chat_logprobs(delta.logprobs, tokenizer, top)
                        held.hold(lists[delta.index].add({"content": content}))
        prompt = submission.prompts[0]
        messages = [
            _message(use, text, ids, prompt, counts) for text, ids in zip(texts, token_ids, strict=True)
        ]
        if request.include_reasoning is False:
            for message in messages:
                message.reasoning_content = None
        ticket.finish(outcome_of_finishes(finishes))
        completion = ChatCompletion(
            id=f"chatcmpl-{ticket.request_id}",
            created=int(time.time()),
            model=request.model,
            choices=[
                ChatChoice(
                    index=index,
                    message=message,
                    logprobs=None,
                    finish_reason=_shown_finish(
                        finishes[index] or "stop", isinstance(message, ToolCallMessage)
                    ),
                    token_ids=output.token_ids(index),
                )
                for index, message in enumerate(messages)
            ],
            system_fingerprint=self._state.fingerprint,
            usage=usage(counts),
            prompt_token_ids=output.prompt_token_ids(0),
            prompt_logprobs=output.scores(),
        )
        answer = completion.model_dump_json()
        if request.logprobs:
            answer = with_logprobs(answer, [each.text('"refusal":null') for each in lists])
        return output.fill(answer, [0]).encode()

    async def stream(self, request: ChatRequest, ticket: Ticket) -> AsyncGenerator[bytes, None]:
        """Yield the server-sent events of a chat completion as its text arrives.

        Closing the iterator aborts the request.
        """
        submission, use = await self.prepare(request)
        prompt = submission.prompts[0]
        readers = [use.reader(prompt) for _ in range(submission.n)] if use.reader else None
        called: set[int] = set()
        counts = TokenCounts(reasoning=0 if use.reasons else None)
        finishes: dict[int, Finish] = {}
        events = _ChatEvents(self._state, ticket.request_id, request.model, request.include_usage())
        tokenizer, top = self._state.tokenizer, request.top_logprobs or 0
        begun: set[int] = set()
        if request.return_token_ids:
            events.prompt_member = ids_member("prompt_token_ids", prompt)
        shows_tokens = bool(request.return_token_ids) and not _hides_tokens(request, use)
        continuous = request.continuous_usage()
        reported: list[int] = []  # completion tokens per choice, as in the last usage sent to the client
        async with aclosing(self._generator.run(submission, counts, ticket)) as deltas:
            async for delta in deltas:
                event = b""
                if delta.index not in begun:
                    begun.add(delta.index)
                    # As in vLLM, a choice's first chunk has only the role; its usage counts no new tokens.
                    if continuous:
                        events.usage_member = usage_so_far(replace(counts, choices=reported))
                    event = events.role(delta.index, b'""' if readers is None else b"null")
                if continuous:
                    reported = list(counts.choices)
                    events.usage_member = usage_so_far(counts)
                if shows_tokens:
                    events.tokens_member = ids_member("token_ids", delta.token_ids)
                lists = b"null"
                if request.logprobs:
                    content = chat_logprobs(delta.logprobs, tokenizer, top)
                    lists = json.dumps({"content": content, "refusal": None}).encode()
                text = delta.text
                calls: Sequence[CallDelta] = ()
                if readers is not None:
                    finished = delta.finish_reason is not None
                    reader = readers[delta.index]
                    text, calls, reasoning = reader.push(text, delta.token_ids, finished=finished)
                    if finished and use.reasons:
                        counts.reasoning = (counts.reasoning or 0) + reader.reasoning_tokens
                    if reasoning and request.include_reasoning is not False:
                        event += events.reasoning(delta.index, reasoning)
                if text or delta.logprobs:
                    event += events.content(delta.index, text if text or readers is None else None, lists)
                if calls:
                    called.add(delta.index)
                    event += events.calls(delta.index, calls)
                if delta.finish_reason is not None:
                    finishes[delta.index] = delta.finish_reason
                    shown = _shown_finish(delta.finish_reason, delta.index in called)
                    event += events.finish(delta.index, shown)
                # The text of the new tokens is held back for parsing, but the client gets their ids now.
                elif events.tokens_member and delta.token_ids:
                    event += events.nothing(delta.index)
                if event:
                    yield event
        ticket.finish(outcome_of_finishes(list(finishes.values())))
        if request.include_usage():
            yield events.usage(counts)

    async def prepare(
        self, request: ChatRequest, *, default_max_tokens: int | None = None
    ) -> tuple[Submission, ToolUse]:
        """Return what a request submits to the engine, and how it uses tools.

        The method removes the messages and tools from ``request`` to free memory, because a waiting request
        no longer needs them.

        Args:
            request: The request.
            default_max_tokens: Upper bound of the completion tokens of a request without a limit; None uses the
                server's setting.
        """
        state, generator = self._state, self._generator
        lora = state.check_model(request.model)
        state.check_task()
        check_stream_options(request)
        check_prompt_logprobs(request)
        if request.top_logprobs and not request.logprobs:
            raise invalid_value("top_logprobs is only allowed with logprobs: true", "top_logprobs")
        limit, param = request.max_completion_tokens, "max_completion_tokens"
        if limit is None:
            limit, param = request.max_tokens, "max_tokens"
        elif request.max_tokens not in (None, limit):
            raise invalid_value(
                f"max_tokens is {request.max_tokens} and max_completion_tokens {limit}; send one of them",
                "max_tokens",
            )
        prompt, use = await self.prompt(request)
        prompt = generator.truncated(prompt, request.truncate_prompt_tokens, limit)
        default = state.settings.default_chat_max_tokens if default_max_tokens is None else default_max_tokens
        max_tokens = generator.max_tokens(limit, len(prompt), default=default, param=param, prompt="messages")
        params = request.sampling(
            max_tokens,
            state.tokenizer.eos_token_ids,
            state.plan.model.vocab_size,
            logprobs=(request.top_logprobs or 0) if request.logprobs else None,
            prompt_logprobs=request.prompt_logprobs,
        )
        submission = submission_with_tools(request, prompt, params, use, lora, request.n or 1)
        if request.return_token_ids:
            submission = replace(submission, all_tokens=True)
        request.messages = []
        request.forget()
        return submission, replace(use, shown=())

    async def prompt(self, request: ChatRequest) -> tuple[tuple[int, ...], ToolUse]:
        """Return the token ids of a request's prompt, and how the request uses tools."""
        use = await self._generator.converted(len(request.messages), self._tools, request)
        self._state.check_ready()
        prompt = await chat_prompt(
            self._state,
            self._generator,
            request.messages,
            add_generation_prompt=request.add_generation_prompt is not False,
            continue_final_message=bool(request.continue_final_message),
            template_arguments=request.template_arguments(),
            tools=use.shown,
            add_special_tokens=bool(request.add_special_tokens),
        )
        return prompt, use

    def _tools(self, request: ChatRequest) -> ToolUse:
        choice = request.tool_choice
        tools: list[ToolDict] = [tool.model_dump(exclude_none=True) for tool in request.tools or ()]
        if isinstance(choice, AllowedToolsChoice):
            allowed = choice.allowed_tools
            tools = allowed_tools(tools, [tool.function.name for tool in allowed.tools])
            choice = allowed.mode
        return tool_use(
            self._state,
            tools,
            choice if isinstance(choice, str) else None,
            function=choice.function.name if isinstance(choice, NamedTool) else None,
            parallel=request.parallel_tool_calls is not False,
            messages=earlier_calls(request.messages) if tools else (),
            grammar=request.grammar(),
            template_arguments=request.template_arguments(),
        )


def _hides_tokens(request: ChatRequest, use: ToolUse) -> bool:
    """Return whether an answer must omit its token ids, because they would reveal the hidden reasoning."""
    return request.include_reasoning is False and use.reasons


def _message(
    use: ToolUse, text: str, token_ids: Sequence[int], prompt: Sequence[int], counts: TokenCounts
) -> AssistantMessage:
    """Return the message of an answer, and add the tokens of its reasoning to ``counts``."""
    if use.reader is None:
        return AssistantMessage(content=text)
    reader = use.reader(prompt)
    content, deltas, thought = reader.whole(text, token_ids)
    if use.reasons:
        counts.reasoning = (counts.reasoning or 0) + reader.reasoning_tokens
    if not deltas:
        # The content is null in an answer that was cut off within its reasoning.
        shown = None if thought and not content else content
        return AssistantMessage(content=shown, reasoning_content=thought or None)
    calls = [
        ToolCall(id=call.id, type="function", function=FunctionCall(name=call.name, arguments=call.arguments))
        for call in calls_of(deltas)
    ]
    return ToolCallMessage(content=content or None, reasoning_content=thought or None, tool_calls=calls)


def _shown_finish(finish: Finish, called: bool) -> Finish | Literal["tool_calls"]:
    """Return the finish reason for the client: ``tool_calls`` for an answer with calls that was not cut off.

    Other answers keep the engine's finish reason.
    """
    return "tool_calls" if called and finish == "stop" else finish


class _ChatEvents(ChunkWriter):
    """Writer of the server-sent chunks of one streamed chat completion."""

    prefix, kind = "chatcmpl", "chat.completion.chunk"
    # JSON members that only the next chunk has: the prompt's token ids, and the ids of the choice's new tokens
    prompt_member = tokens_member = b""

    def role(self, index: int, content: bytes) -> bytes:
        # ``content`` is null if a tool call may follow: clients show an empty text as a block of its own.
        return self._choice(index, b'{"role":"assistant","content":%b,"refusal":null}' % content)

    def content(self, index: int, text: str | None, logprobs: bytes) -> bytes:
        content = b"null" if text is None else encode_basestring_ascii(text).encode()
        return self._choice(index, b'{"content":%b}' % content, logprobs)

    def reasoning(self, index: int, text: str) -> bytes:
        return self._choice(index, b'{"reasoning_content":%b}' % encode_basestring_ascii(text).encode())

    def calls(self, index: int, deltas: Sequence[CallDelta]) -> bytes:
        # Merge the pieces of one call within a chunk, since openai's stream() counts two pieces of a call as
        # two calls.
        return self._choice(
            index, json.dumps({"tool_calls": [_delta(delta) for delta in merged(deltas)]}).encode()
        )

    def nothing(self, index: int) -> bytes:
        return self._choice(index, b"{}")

    def finish(self, index: int, reason: str) -> bytes:
        return self._choice(index, b"{}", finish=b'"%b"' % reason.encode())

    def _choice(self, index: int, delta: bytes, logprobs: bytes = b"null", finish: bytes = b"null") -> bytes:
        prompt, self.prompt_member = self.prompt_member, b""
        tokens, self.tokens_member = self.tokens_member, b""
        return b'%b{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b%b}%b%b%b}\n\n' % (
            self._head,
            index,
            delta,
            logprobs,
            finish,
            tokens,
            self._tail,
            prompt,
            self.usage_member,
        )


def _delta(delta: CallDelta) -> dict[str, Any]:
    """Return an item of ``choices.delta.tool_calls`` in a streamed chunk.

    Only the first item of a call has its id, type and function name.
    """
    function: dict[str, Any] = {"arguments": delta.arguments}
    if delta.name is None:
        return {"index": delta.index, "function": function}
    named = {"name": delta.name} | function
    return {"index": delta.index, "id": delta.id, "type": "function", "function": named}
