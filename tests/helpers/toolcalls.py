"""Functions a model may call in the tests, and its calls as clients put them together."""

from __future__ import annotations

import json
from typing import Any

from openai.types.chat import ChatCompletionChunk
from openai.types.chat.chat_completion_message import ChatCompletionMessage

# Written for these tests: ChatML with Hermes' form of tools, which Qwen and others share; reasoning as Qwen3.
TEMPLATE = """\
{%- if tools %}<|im_start|>system
Tools: {% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}
{%- for call in m.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def function(name: str, properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    parameters = {
        "type": "object", "properties": properties, "required": list(properties), "additionalProperties": False,
    }  # fmt: skip
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


WEATHER = function("get_weather", {"city": {"enum": ["Paris", "Oslo"]}, "days": {"enum": [1, 2]}})
CLOCK = function("get_time", {"zone": {"type": "string", "pattern": "^[A-Z]{3}$"}})
ASK = [{"role": "user", "content": "What is the weather in Paris?"}]


def told(message: ChatCompletionMessage) -> list[tuple[str, Any]]:
    """(name, arguments) of the message's calls; their ids are distinct."""
    calls = message.tool_calls or []
    assert len({call.id for call in calls}) == len(calls)
    return [(call.function.name, json.loads(call.function.arguments)) for call in calls]


def joined(chunks: list[ChatCompletionChunk], index: int = 0) -> tuple[str, list[tuple[str, Any]], str | None]:
    """Text, calls and finish_reason of a stream, put together as OpenAI's clients do."""
    text, calls, finish = "", {}, None
    for chunk in chunks:
        for choice in (choice for choice in chunk.choices if choice.index == index):
            text += choice.delta.content or ""
            finish = choice.finish_reason or finish
            for call in choice.delta.tool_calls or []:
                if call.index not in calls:
                    assert call.id
                    assert call.type == "function"
                    calls[call.index] = [call.function.name, ""]
                else:
                    assert (call.id, call.function.name) == (None, None)
                calls[call.index][1] += call.function.arguments or ""
    assert sorted(calls) == list(range(len(calls)))
    return text, [(name, json.loads(arguments)) for name, arguments in calls.values()], finish
