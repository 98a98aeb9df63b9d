"""Conversion of a request to Anthropic's API into a request for a chat completion."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby
from typing import Any, Literal

from tonnage.server.api.chat.protocol import (
    ChatRequest,
    FunctionCall,
    FunctionDefinition,
    Message,
    NamedFunction,
    NamedTool,
    Tool,
    ToolCall,
    effort_arguments,
)
from tonnage.server.api.messages.protocol import (
    AnthropicMessage,
    AnthropicTool,
    AnthropicToolChoice,
    CountTokensRequest,
    MessagesRequest,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from tonnage.server.api.sampling import JsonSchema, ResponseFormat
from tonnage.server.errors import ApiError, ErrorCode, invalid_value

# Start of the block that Claude Code puts first in a system prompt. The server drops this block, as vLLM 0.32
# does (entrypoints/anthropic/serving.py). The block differs in each request, so no token after it would be
# found in the prefix cache.
_BILLING = "x-anthropic-billing-header"


def blocks_of(body: CountTokensRequest) -> int:
    """Return the number of content blocks in a request's messages."""
    return sum(1 if isinstance(turn.content, str) else len(turn.content) for turn in body.messages)


def chat_request(body: CountTokensRequest) -> ChatRequest:
    """Return the chat request with the prompt, tools and sampling of ``body``, but without ``max_tokens``.

    Raises:
        ApiError: A block is not allowed for the role of its message, or ``tool_choice`` lacks a name.
    """
    messages = _messages(body)
    continues = messages[-1].role == "assistant"
    choice = body.tool_choice or AnthropicToolChoice(type="auto")
    more: dict[str, Any] = {}
    if isinstance(body, MessagesRequest):
        more = {
            "stream": body.stream,
            "stop": body.stop_sequences or None,
            "temperature": body.temperature,
            "top_k": body.top_k,
            "top_p": body.top_p,
            "cache_salt": body.cache_salt,
            "priority": body.priority,
            "add_special_tokens": body.add_special_tokens,
        }
    return ChatRequest.model_construct(
        model=body.model,
        messages=messages,
        tools=[_tool(tool) for tool in body.tools or ()] or None,
        tool_choice=_tool_choice(choice) if body.tools or choice.type in ("any", "tool") else None,
        parallel_tool_calls=not choice.disable_parallel_tool_use,
        response_format=_format(body),
        add_generation_prompt=not continues,
        continue_final_message=continues,
        chat_template_kwargs=_template_arguments(body),
        **more,
    )


def _messages(body: CountTokensRequest) -> list[Message]:
    """Return the conversation as chat messages; consecutive turns of the user are joined, as Anthropic does."""
    converted: list[Message] = []
    system = body.system if isinstance(body.system, str) else _text(body.system or ())
    if system:
        converted.append(Message(role="system", content=system))
    for at, message in enumerate(body.messages):
        blocks = [TextBlock(type="text", text=message.content)] if isinstance(message.content, str) else None
        converted += _converted(message, message.content if blocks is None else blocks, at)
    found: list[Message] = []
    for role, turns in groupby(converted, key=lambda message: message.role):
        made = list(turns)
        # One join for all turns, because each join of two turns would copy the text of all earlier ones.
        text = "\n".join(turn.text() for turn in made) if role == "user" else ""
        found += made if role != "user" else [Message(role="user", content=text)]
    return found


def _converted(message: AnthropicMessage, blocks: Sequence[Any], at: int) -> list[Message]:
    """Return the chat messages of one turn: results of tools come before the user's text."""
    calls: list[ToolCall] = []
    results: list[Message] = []
    texts: list[TextBlock] = []
    thoughts: list[str] = []
    allowed = (ThinkingBlock, ToolUseBlock) if message.role == "assistant" else (ToolResultBlock,)
    for number, block in enumerate(blocks):
        if isinstance(block, TextBlock):
            texts.append(block)
            continue
        if message.role == "system" or not isinstance(block, allowed):
            if message.role == "assistant" and block.type == "redacted_thinking":
                continue
            raise invalid_value(
                f"messages.{at}.content.{number}: a {block.type} block is not allowed in a message of the role "
                f"{message.role}",
                f"messages.{at}.content.{number}",
            )
        if isinstance(block, ThinkingBlock):
            thoughts.append(block.thinking)
        elif isinstance(block, ToolUseBlock):
            function = FunctionCall(name=block.name, arguments=json.dumps(block.input))
            calls.append(ToolCall(id=block.id, type="function", function=function))
        else:
            content = block.content if isinstance(block.content, str) else _text(block.content or ())
            results.append(Message(role="tool", content=content, tool_call_id=block.tool_use_id))
    if message.role == "assistant":
        thought = "\n".join(thoughts) or None
        return [Message(role="assistant", content=_text(texts), reasoning=thought, tool_calls=calls or None)]
    return [*results, Message(role=message.role, content=_text(texts))] if texts or not results else results


def _text(blocks: Sequence[TextBlock]) -> str:
    return "\n".join(block.text for block in blocks if not block.text.startswith(_BILLING))


def _tool_choice(choice: AnthropicToolChoice) -> Literal["none", "auto", "required"] | NamedTool:
    if choice.type == "tool":
        if choice.name is None:
            raise ApiError(
                ErrorCode.MISSING_PARAMETER, "you must provide tool_choice.name", param="tool_choice.name"
            )
        return NamedTool(type="function", function=NamedFunction.model_construct(name=choice.name))
    if choice.type == "any":
        return "required"
    return "none" if choice.type == "none" else "auto"


def _tool(tool: AnthropicTool) -> Tool:
    """Return a tool of a chat request, without validation: its name may be longer than OpenAI allows."""
    function = FunctionDefinition.model_construct(
        name=tool.name,
        description=tool.description,
        parameters={"type": "object"} | tool.input_schema,
        strict=tool.strict,
    )
    return Tool.model_construct(type="function", function=function)


def _format(body: CountTokensRequest) -> ResponseFormat | None:
    form = body.output_config.format if body.output_config else None
    if form is None:
        return None
    schema = JsonSchema.model_validate({"name": "answer", "schema": form.schema_})
    return ResponseFormat(type="json_schema", json_schema=schema)


def _template_arguments(body: CountTokensRequest) -> dict[str, Any]:
    """Return the variables that the request passes to the chat template, which ignores unknown ones."""
    arguments: dict[str, Any] = {}
    if body.thinking is not None:
        arguments["enable_thinking"] = body.thinking.type != "disabled"
    if body.output_config is not None and body.output_config.effort is not None:
        arguments = effort_arguments(body.output_config.effort) | arguments
    return arguments | (body.chat_template_kwargs or {})
