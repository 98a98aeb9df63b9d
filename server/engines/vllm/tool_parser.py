"""Tool calls in a model's text, read by vLLM's tool parsers (0.32) for any engine.

Only `load_tool_parser` imports vLLM, and only with --enable-auto-tool-choice. The import loads torch into the
API process (9 s and about 470 MiB on the machine of benchmarks/README.md).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tonnage.planner.errors import DeploymentError, TonnageError
from tonnage.server.engines.vllm.arguments import ENVIRONMENT
from tonnage.server.text.grammar import Grammar
from tonnage.server.text.tool_calls import CallDelta, ToolDict, ToolUse, new_call_id


class ToolsRefused(TonnageError):
    """An error for a request whose tools vLLM's parser rejects."""

    code = "invalid_value"


def load_tool_parser(name: str, folder: Path) -> VLLMToolParser:
    """Return vLLM's tool parser `name`, set up with the tokenizer in `folder`.

    Raises:
        DeploymentError: vLLM is not installed or has no such parser, or the parser cannot use the tokenizer.
    """
    for variable, value in ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    before = os.environ.copy()
    try:
        from transformers import AutoTokenizer
        from vllm.parser import ParserManager
        from vllm.tool_parsers import ToolParserManager
    except ImportError as error:
        raise DeploymentError(
            f"tool parsers need vLLM, which cannot be imported: {error}",
            field="tool_call_parser",
            hint="pip install vllm on a GPU machine, or 'tonnage[vllm]' for a CPU",
        ) from None
    # Remove variables that vLLM sets for its own children, because the engine process must not inherit them.
    finally:
        for variable in os.environ.keys() - before.keys():
            del os.environ[variable]
        os.environ.update(before)
    known = ToolParserManager.list_registered()
    if name not in known:
        raise DeploymentError(
            f"vLLM has no parser {name!r}", field="tool_call_parser", hint=f"one of {', '.join(known)}"
        )
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    try:
        parser = ParserManager.get_parser(
            tool_parser_name=name, enable_auto_tools=True, model_name=str(folder), tokenizer=tokenizer
        )
    except Exception as error:  # a parser may raise many types if the tokenizer lacks its tokens
        raise DeploymentError(
            f"{name} does not work with this model: {str(error)[:300]}", field="tool_call_parser"
        ) from None
    return VLLMToolParser(parser, tokenizer)


class VLLMToolParser:
    """A reader of the tool calls in one model's output.

    Each output is read by a new object of a class that vLLM composes for the model.
    """

    def __init__(self, parser: Any, tokenizer: Any) -> None:
        self._parser = parser
        self._tokenizer = tokenizer

    def use(
        self, tools: Sequence[ToolDict], messages: Sequence[Mapping[str, Any]], *, parallel: bool
    ) -> ToolUse:
        """Return how to generate and read the output of a request with these tools.

        Strict functions, and requests for at most one call, constrain the output by the model's own call
        syntax. Special tokens stay in the text if the parser needs them.

        Args:
            tools: tool definitions of the request.
            messages: messages of the conversation.
            parallel: whether the output may have more than one call.

        Raises:
            ToolsRefused: the parser rejects the tools.
        """
        try:
            request = self._request(tools, messages, parallel)
            adjusted = self._parser(self._tokenizer, request.tools).adjust_request(request)
        except (ValueError, TypeError, RuntimeError) as error:  # types that pydantic and xgrammar raise
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise ToolsRefused(f"the tool parser rejects them: {lines[0][:200]}", field="tools") from None
        outputs = adjusted.structured_outputs
        tag = None if outputs is None else outputs.structural_tag
        return ToolUse(
            tuple(tools),
            None if tag is None else Grammar("structural_tag", tag),
            not adjusted.skip_special_tokens,
            lambda: _Reader(self._parser(self._tokenizer, adjusted.tools), adjusted, parallel),
        )

    def _request(self, tools: Sequence[ToolDict], messages: Sequence[Mapping[str, Any]], parallel: bool) -> Any:
        # Imported here, because vLLM is optional. It is installed if this parser exists.
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        return ChatCompletionRequest.model_validate(
            {
                "model": "",
                # Some parsers number the calls of the whole conversation, so they need the earlier calls.
                "messages": [
                    {"role": "user", "content": ""},
                    *(dict(message) for message in messages if message.get("tool_calls")),
                ],
                "tools": [dict(tool) for tool in tools],
                "tool_choice": "auto",
                "parallel_tool_calls": parallel,
            }
        )


class _Reader:
    def __init__(self, parser: Any, request: Any, parallel: bool) -> None:
        self._parser, self._request, self._parallel = parser, request, parallel
        self._named: set[int] = set()

    def whole(self, text: str, token_ids: Sequence[int]) -> tuple[str, Sequence[CallDelta]]:
        _, content, calls = self._parser.parse(
            text, self._request, enable_auto_tools=True, model_output_token_ids=list(token_ids)
        )
        found = [
            CallDelta(index, call.arguments, call.id or new_call_id(), call.name)
            for index, call in enumerate(calls or ())
        ]
        return content or "", found if self._parallel else found[:1]

    def push(self, text: str, token_ids: Sequence[int], *, finished: bool) -> tuple[str, Sequence[CallDelta]]:
        # The list of prompt token ids is empty: only a reasoning parser would read it, and none is configured.
        message = self._parser.parse_delta(text, list(token_ids), self._request, [], finished=finished)
        if message is None:
            return "", ()
        return message.content or "", [
            delta
            for call in message.tool_calls
            if (self._parallel or call.index == 0) and (delta := self._delta(call)) is not None
        ]

    def _delta(self, call: Any) -> CallDelta | None:
        """Return vLLM's delta of one tool call; as in OpenAI's API, only its first delta has name and id."""
        function = call.function
        name = (function.name if function else None) or None
        if name is not None and call.index not in self._named:
            self._named.add(call.index)
            return CallDelta(call.index, function.arguments or "", call.id or new_call_id(), name)
        arguments = (function.arguments if function else None) or ""
        return CallDelta(call.index, arguments) if arguments else None
