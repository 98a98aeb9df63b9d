"""Conversion of chat messages to the token ids of a prompt, by the model's chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pydantic_core

from tonnage.server.api.chat.protocol import Message, ToolCall
from tonnage.server.api.generation import Generator
from tonnage.server.api.json_body import check_embedded, most_values
from tonnage.server.errors import ApiError, ErrorCode, invalid_value, unsupported_parameter
from tonnage.server.state import ServerState

# Names that chat_template_kwargs must not set, because the server or Jinja itself passes them to the template.
_RESERVED = frozenset({"messages", "add_generation_prompt", "tools", "documents", "self"})


# Conversations of up to this many characters and messages are formatted on the event loop, in about a
# millisecond. Larger ones, and those with tools, whose JSON a template may expand, are formatted in a thread.
_INLINE_CHARACTERS, _INLINE_MESSAGES = 16_384, 64


async def chat_prompt(
    state: ServerState,
    generator: Generator,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    template_arguments: Mapping[str, Any] | None = None,
    tools: Sequence[Mapping[str, Any]] = (),
    add_special_tokens: bool = False,
    param: str = "messages",
) -> tuple[int, ...]:
    """Return the token ids of a conversation, formatted by the model's chat template.

    The template itself writes special tokens, such as BOS, so by default the tokenizer adds none.

    Raises:
        ApiError: The conversation is invalid, or too long for the context.
        TemplateRefused: The template rejects the conversation.
    """
    if state.chat_template is None:
        raise ApiError(
            ErrorCode.UNSUPPORTED_ENDPOINT,
            "the model has no chat template; use /v1/completions",
            param="messages",
        )
    template = state.chat_template
    call_arguments = [call.function.arguments for message in messages for call in message.tool_calls or ()]

    def formatted() -> str:
        check_embedded(call_arguments, most_values(state.max_model_len), "the JSON in tool call arguments")
        variables = template_arguments or {}
        check_template_arguments(variables)
        if continue_final_message and add_generation_prompt:
            raise invalid_value(
                "continue_final_message needs add_generation_prompt: false", "continue_final_message"
            )
        text = template.render(
            [_for_template(message, at) for at, message in enumerate(messages)],
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            **variables,
        )
        return _up_to_final_message(text, messages[-1]) if continue_final_message else text

    is_large = (
        bool(tools or call_arguments)
        or len(messages) > _INLINE_MESSAGES
        or sum(len(message.text()) for message in messages) > _INLINE_CHARACTERS
    )
    text = await generator.in_thread(formatted) if is_large else formatted()
    await generator.check_characters([text], param)
    prompt = await generator.encode(text, add_special_tokens=add_special_tokens)
    generator.check_token_ids([prompt], param)
    return prompt


def earlier_calls(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return the messages of a conversation that have tool calls; some tool call parsers need them."""
    return [message.model_dump(exclude_none=True) for message in messages if message.tool_calls]


def check_template_arguments(arguments: Mapping[str, Any]) -> None:
    """Raise ApiError when chat_template_kwargs sets a variable that the server or Jinja itself sets."""
    if taken := _RESERVED & arguments.keys():
        name = sorted(taken)[0]
        raise invalid_value(
            f"chat_template_kwargs: {name} is set by the server; remove {name}", "chat_template_kwargs"
        )


def _up_to_final_message(text: str, message: Message) -> str:
    """Return the prompt ``text`` up to the end of its final message, which the answer continues."""
    # After the final message the template writes an end-of-turn token. It is cut off, because the answer
    # continues the message.
    last = message.text().strip()
    at = text.rfind(last)
    if not last or at < 0:
        raise invalid_value(
            "continue_final_message is impossible: the chat template does not show the final message unchanged",
            "continue_final_message",
        )
    return text[: at + len(last)]


def _check(message: Message, at: int) -> None:
    """Raise ApiError when a message breaks OpenAI's rules for its role (ChatCompletionMessageParam)."""
    param = f"messages.{at}.content"
    # OpenAI allows null content for a function's message, and for an assistant's, which may have called tools
    # instead.
    if message.content is None and message.role not in ("assistant", "function"):
        raise ApiError(
            ErrorCode.MISSING_PARAMETER,
            f"you must provide {param}, a string or a list of text parts, for the role {message.role}",
            param=param,
        )
    if message.declines and message.role != "assistant":
        raise unsupported_parameter(
            f"{param}: a message of the role {message.role} may have no refusal parts; send text parts",
            param,
        )
    if message.role == "tool" and not message.tool_call_id:
        raise ApiError(
            ErrorCode.MISSING_PARAMETER,
            f"you must provide messages.{at}.tool_call_id, the id of the tool call that the message answers",
            param=f"messages.{at}.tool_call_id",
        )
    for name in ("reasoning", "reasoning_content"):
        if getattr(message, name) is not None and message.role != "assistant":
            raise unsupported_parameter(
                f"messages.{at}.{name}: only the role assistant may have this field, not {message.role}",
                f"messages.{at}.{name}",
            )


def _for_template(message: Message, at: int) -> dict[str, Any]:
    """Return the message as the dict that chat templates expect; the role ``developer`` becomes ``system``."""
    _check(message, at)
    shown: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": message.text(),
    }
    if message.name is not None:
        shown["name"] = message.name
    thought = message.reasoning if message.reasoning is not None else message.reasoning_content
    # The template gets the reasoning under both names of the field (`reasoning` and `reasoning_content`), as in
    # vLLM 0.32 (renderers/chat_utils.py).
    if thought is not None:
        shown["reasoning"] = shown["reasoning_content"] = thought
    if message.tool_calls:
        shown["tool_calls"] = [_call_for_template(call, at) for call in message.tool_calls]
    if message.tool_call_id is not None:
        shown["tool_call_id"] = message.tool_call_id
    return shown


def _call_for_template(call: ToolCall, at: int) -> dict[str, Any]:
    """Return a tool call as chat templates expect it: its arguments are an object, not OpenAI's JSON string.

    Templates serialize the arguments themselves (transformers' guide to chat templates).
    """
    why = ""
    try:
        # Templates visit a tool call's arguments by recursion, so the arguments must not be nested too deeply.
        # pydantic's JSON parser, which also reads request bodies, limits the depth.
        arguments = pydantic_core.from_json(call.function.arguments or "{}")
    except ValueError as error:
        arguments, why = None, f": {str(error)[:200]}"
    if not isinstance(arguments, dict):
        raise invalid_value(
            f"messages.{at}.tool_calls: the arguments of {call.function.name[:64]} are not a JSON object{why}",
            f"messages.{at}.tool_calls",
        )
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}
