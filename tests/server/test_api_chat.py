"""Chat prompts: the template as transformers renders it, roles, refusals; the same path as completions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from tonnage.planner.errors import ConfigError
from tonnage.server.text.chat_template import ChatTemplate, TemplateRefused

CONVERSATIONS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "hello"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "é 日本 <|im_end|>"}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": " c "},
    ],
]

# What templates of published models use: loop controls, namespaces, tojson, generation blocks, special tokens.
TEMPLATES = [
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content | trim }}{% endfor %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}"
    "{% set ns.n = ns.n + 1 %}{{ ns.n }}: {{ m.content }}\n{% endfor %}",
    "{{ messages | tojson }}{% if add_generation_prompt %}{{ eos_token }}{% endif %}",
    "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "{%- for m in messages %}\n    {{- m['content'] }}\n{%- endfor %}",
]


@pytest.mark.parametrize("messages", CONVERSATIONS, ids=range(len(CONVERSATIONS)))
async def test_chat_prompt_tokens_equal_transformers(server, tokenizer_folder: Path, messages: Any) -> None:
    expected = AutoTokenizer.from_pretrained(tokenizer_folder).apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )
    response = await server.http.post("/tokenize", json={"messages": messages, "return_token_strs": True})
    assert response.json()["tokens"] == expected
    assert response.json()["count"] == len(expected) == len(response.json()["token_strs"])
    answer = await server.openai.chat.completions.create(model="demo", messages=messages, max_tokens=1)
    assert answer.usage.prompt_tokens == len(expected)


@pytest.mark.parametrize("source", TEMPLATES)
def test_chat_templates_render_the_same_text_as_in_transformers(source: str) -> None:
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    for messages in CONVERSATIONS:
        for prompt in (False, True):
            (expected,), _ = render_jinja_template(
                [messages], chat_template=source, add_generation_prompt=prompt, **tokens
            )
            assert ChatTemplate(source, tokens).render(messages, add_generation_prompt=prompt) == expected


def test_chat_templates_are_sandboxed_and_invalid_ones_rejected() -> None:
    with pytest.raises(ConfigError, match="line 1"):
        ChatTemplate("{% for %}")
    for source in ("{{ ''.__class__.__mro__ }}{{ cycler.__init__.__globals__ }}", "{{ messages.append(1) }}"):
        with pytest.raises(TemplateRefused):
            ChatTemplate(source).render([])
    with pytest.raises(TemplateRefused, match="roles must alternate"):
        ChatTemplate("{{ raise_exception('roles must alternate') }}").render([])


async def test_chat_completion_equals_the_completion_of_the_rendered_prompt(server) -> None:
    messages = CONVERSATIONS[1]
    tokens = (await server.http.post("/tokenize", json={"messages": messages})).json()["tokens"]
    same = {"model": "demo", "temperature": 0, "max_tokens": 12}
    chat = await server.openai.chat.completions.create(messages=messages, **same)
    plain = await server.openai.completions.create(prompt=tokens, **same)
    assert chat.choices[0].message.content == plain.choices[0].text
    stream = await server.openai.chat.completions.create(messages=messages, stream=True, **same)
    parts = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
    assert "".join(parts) == plain.choices[0].text
    response = await server.openai.responses.create(
        model="demo", input=messages, temperature=0, max_output_tokens=12
    )
    assert response.output_text == plain.choices[0].text


async def test_developer_message_with_content_parts_is_rendered_like_a_system_message(server) -> None:
    async def text(**body: Any) -> str:
        tokens = (await server.http.post("/tokenize", json=body)).json()["tokens"]
        return (await server.http.post("/detokenize", json={"tokens": tokens})).json()["prompt"]

    developer = [
        {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "x"}]}
    ]
    system = [{"role": "system", "content": "Be x"}]
    assert await text(messages=developer) == await text(messages=system)
    body = {
        "model": "demo",
        "messages": [*CONVERSATIONS[0], {"role": "assistant", "content": "The answer is"}],
        "continue_final_message": True,
        "max_tokens": 1,
    }
    refused = await server.http.post("/v1/chat/completions", json=body)
    assert refused.json()["error"]["param"] == "continue_final_message"
    answer = await server.http.post("/v1/chat/completions", json=body | {"add_generation_prompt": False})
    assert answer.status_code == 200


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": []}, "invalid_value", "messages"),
    ({"messages": None}, "invalid_type", "messages"),
    ({"messages": [{"role": "robot", "content": "a"}]}, "invalid_value", "messages.0.role"),
    ({"messages": [{"content": "a"}]}, "missing_required_parameter", "messages.0.role"),
    ({"messages": [{"role": "user", "content": "a", "x": 1}]}, "unknown_parameter", "messages.0.x"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "invalid_value",
        "messages.0.content",
    ),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "unsupported_parameter", "tools"),
    ({"tool_choice": "required"}, "invalid_value", "tool_choice"),
    ({"response_format": {"type": "json_object"}}, "unsupported_parameter", "response_format"),
    ({"logprobs": True}, "unsupported_parameter", "logprobs"),
    ({"modalities": ["audio"]}, "unsupported_parameter", "modalities"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "invalid_value", "max_tokens"),
    ({"max_completion_tokens": 4000}, "context_length_exceeded", "max_completion_tokens"),
    ({"chat_template": "{{ x }}"}, "unsupported_parameter", "chat_template"),
    ({"chat_template_kwargs": {"messages": []}}, "invalid_value", "chat_template_kwargs"),
    ({"model": "gpt-4"}, "model_not_found", "model"),
]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_invalid_chat_fields_are_rejected_before_they_reach_the_engine(server, stream: bool) -> None:
    valid = {"model": "demo", "messages": CONVERSATIONS[0], "max_tokens": 2, "stream": stream}
    for change, code, param in REFUSED:
        body = valid | change
        if "max_completion_tokens" in change and "max_tokens" not in change:
            del body["max_tokens"]
        response = await server.http.post("/v1/chat/completions", json=body)
        error = response.json()["error"]
        assert (error["code"], error["param"]) == (code, param), (change, error)
    assert server.engine.stats().prompt_tokens == 0


async def test_embeddings_request_to_a_generative_model_is_rejected(server) -> None:
    response = await server.http.post("/v1/embeddings", json={"model": "demo", "input": "a"})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "unsupported_endpoint"
