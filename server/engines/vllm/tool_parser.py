"""How a family of models writes tool calls: vLLM's parsers (0.32), for whichever engine generates the text.

Nothing of vLLM is imported before ``load_tool_parser``: it brings torch into the API process (nine seconds
and about 470 MiB on the machine of benchmarks/README.md), so only with --enable-auto-tool-choice.
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
    """vLLM's parser says no to the tools of a request."""

    code = "invalid_value"


def load_tool_parser(name: str, folder: Path) -> VLLMToolParser:
    """vLLM's parser ``name`` on the tokenizer in ``folder``.

    Raises DeploymentError without vLLM, for a name it does not know and for a tokenizer the parser cannot use.
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
            f"tool parsers are vLLM's, which cannot be imported: {error}",
            field="tool_call_parser",
            hint="pip install vllm on a GPU machine, or 'tonnage[vllm]' for a CPU",
        ) from None
    finally:  # vLLM sets variables for its own children; the engine's process is none of them
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
    except Exception as error:  # a parser may raise anything about a tokenizer without its tokens
        raise DeploymentError(
            f"{name} does not suit this model: {str(error)[:300]}", field="tool_call_parser"
        ) from None
    return VLLMToolParser(parser, tokenizer)


class VLLMToolParser:
    """``parser``: vLLM's composed Parser class; one object of it reads one answer."""

    def __init__(self, parser: Any, tokenizer: Any) -> None:
        self._parser = parser
        self._tokenizer = tokenizer

    def use(
        self, tools: Sequence[ToolDict], messages: Sequence[Mapping[str, Any]], *, parallel: bool
    ) -> ToolUse:
        """The request as this parser wants it: special tokens in the text, and for strict functions (or one
        call at most) the model's own form of a call as a grammar."""
        try:
            request = self._request(tools, messages, parallel)
            adjusted = self._parser(self._tokenizer, request.tools).adjust_request(request)
        except (ValueError, TypeError, RuntimeError) as error:  # pydantic's and xgrammar's
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise ToolsRefused(f"the tool parser does not take them: {lines[0][:200]}", field="tools") from None
        outputs = adjusted.structured_outputs
        tag = None if outputs is None else outputs.structural_tag
        return ToolUse(
            tuple(tools),
            None if tag is None else Grammar("structural_tag", tag),
            not adjusted.skip_special_tokens,
            lambda: _Reader(self._parser(self._tokenizer, adjusted.tools), adjusted, parallel),
        )

    def _request(self, tools: Sequence[ToolDict], messages: Sequence[Mapping[str, Any]], parallel: bool) -> Any:
        # vLLM is there once a parser is
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        return ChatCompletionRequest.model_validate(
            {
                "model": "",
                # Some parsers number calls through the conversation: they count the calls before.
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
        # The empty prompt: no reasoning parser is there that would look at it.
        message = self._parser.parse_delta(text, list(token_ids), self._request, [], finished=finished)
        if message is None:
            return "", ()
        return message.content or "", [
            delta
            for call in message.tool_calls
            if (self._parallel or call.index == 0) and (delta := self._delta(call)) is not None
        ]

    def _delta(self, call: Any) -> CallDelta | None:
        """vLLM's delta; its parsers repeat names and ids at will, OpenAI's stream tells them once."""
        function = call.function
        name = (function.name if function else None) or None
        if name is not None and call.index not in self._named:
            self._named.add(call.index)
            return CallDelta(call.index, function.arguments or "", call.id or new_call_id(), name)
        arguments = (function.arguments if function else None) or ""
        return CallDelta(call.index, arguments) if arguments else None
