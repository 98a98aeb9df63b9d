"""Tool calls and reasoning in a model's text, read by vLLM's parsers (0.32) for any engine.

Only `load_output_parser` imports vLLM, and only with --enable-auto-tool-choice or --reasoning-parser. The
import loads torch into the API process (9 s and about 470 MiB on the machine of benchmarks/README.md).
"""

from __future__ import annotations

import json
import logging
import os
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tonnage.planner.errors import DeploymentError, TonnageError
from tonnage.server.engines.vllm.arguments import ENVIRONMENT
from tonnage.server.text.grammar import Grammar
from tonnage.server.text.tool_calls import AnswerReader, CallDelta, Parsed, ToolDict, ToolUse, new_call_id

# Most of vLLM's tool parsers read the whole text again for each piece (vllm 0.32:
# tool_parsers/hermes_tool_parser.py). So after this many characters, small pieces are joined until they have at
# least a 256th of the length of the text before them. The time for an answer is then linear: 128,000 characters
# in pieces of four characters took 4.4 s before, and take 0.2 s now. At 4,096 characters a joined piece has 16
# characters, which are four tokens of four characters.
_UNJOINED_CHARACTERS, _PIECE_SHARE = 4096, 256


class ToolsRefused(TonnageError):
    """An error for a request whose tools vLLM's parser rejects."""

    code = "invalid_value"


def load_output_parser(tools: str | None, reasoning: str | None, folder: Path) -> VLLMOutputParser:
    """Return vLLM's parsers of tool calls and of reasoning, set up with the tokenizer in `folder`.

    Args:
        tools: name of the tool parser, or None for none.
        reasoning: name of the reasoning parser, or None for none.
        folder: folder of the model.

    Raises:
        DeploymentError: vLLM is not installed or has no such parser, or a parser cannot use the tokenizer.
    """
    for variable, value in ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    before = os.environ.copy()
    try:
        from transformers import AutoTokenizer
        from vllm.parser import ParserManager
        from vllm.reasoning import ReasoningParserManager
        from vllm.tool_parsers import ToolParserManager
    except ImportError as error:
        raise DeploymentError(
            f"tool and reasoning parsers need vLLM, which cannot be imported: {error}",
            field="tool_call_parser" if tools else "reasoning_parser",
            hint="pip install vllm on a GPU machine, or 'tonnage[vllm]' for a CPU",
        ) from None
    # Remove variables that vLLM sets for its own children, because the engine process must not inherit them.
    finally:
        for variable in os.environ.keys() - before.keys():
            del os.environ[variable]
        os.environ.update(before)
    for name, manager, field in (
        (tools, ToolParserManager, "tool_call_parser"),
        (reasoning, ReasoningParserManager, "reasoning_parser"),
    ):
        known = manager.list_registered()
        if name is not None and name not in known:
            raise DeploymentError(
                f"vLLM has no parser {name!r}", field=field, hint=f"use one of {', '.join(known)}"
            )
    if tools is not None:
        logger = logging.getLogger(ToolParserManager.get_tool_parser(tools).__module__)
        logger.addFilter(_without_traceback)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)

    def composed(tools: str | None, reasoning: str | None, strict_level: str = "auto") -> Any:
        try:
            return ParserManager.get_parser(
                tool_parser_name=tools,
                reasoning_parser_name=reasoning,
                enable_auto_tools=tools is not None,
                tool_strict_level=strict_level,
                model_name=str(folder),
                tokenizer=tokenizer,
            )
        except Exception as error:  # a parser may raise many types if the tokenizer lacks its tokens
            raise DeploymentError(
                f"{reasoning or tools} does not work with this model: {str(error)[:300]}",
                field="reasoning_parser" if reasoning else "tool_call_parser",
            ) from None

    parsers = {
        (bool(with_tools), bool(with_reasoning)): composed(with_tools, with_reasoning)
        for with_tools in {tools, None}
        for with_reasoning in {reasoning, None}
        if with_tools or with_reasoning
    }
    # With the strict level "function", the output's grammar always constrains the form of a call. The grammar
    # can then permit either a call or an answer in the required format.
    with_format = composed(tools, None, "function") if tools else None
    return VLLMOutputParser(parsers, with_format, tokenizer)


def _without_traceback(record: logging.LogRecord) -> bool:
    """Remove the traceback from a tool parser's log record, and return True, so that the record is logged.

    The parser logs an exception for text that is no valid tool call, which is no failure of the server.
    """
    record.exc_info = record.exc_text = None
    return True


class VLLMOutputParser:
    """A reader of the tool calls and the reasoning in one model's output.

    Each output is read by a new object of a class that vLLM composes for the model. A key of ``parsers`` is a
    pair of flags (reads tool calls, reads reasoning), and its value is the class. ``with_format`` is the class
    for a request that has tools and also requires a format of the answer.
    """

    def __init__(self, parsers: Mapping[tuple[bool, bool], Any], with_format: Any, tokenizer: Any) -> None:
        self._parsers = parsers
        self._with_format = with_format
        self._tokenizer = tokenizer
        self.reads_tools = (True, False) in parsers
        self.reads_reasoning = (False, True) in parsers

    def use(
        self,
        tools: Sequence[ToolDict],
        messages: Sequence[Mapping[str, Any]],
        *,
        parallel: bool,
        grammar: Grammar | None,
        template_arguments: Mapping[str, Any],
    ) -> ToolUse:
        """Return how to constrain and parse the output of a request with the tools `tools`.

        Strict functions, and requests for at most one call, constrain the output by the model's own call
        syntax. Special tokens stay in the text if the parser needs them.

        Args:
            tools: tool definitions of the request; empty if only reasoning is read.
            messages: messages of the conversation.
            parallel: whether the output may have more than one call.
            grammar: format that an output without calls must have, or None. With a format, the output has no
                reasoning.
            template_arguments: arguments of the chat template, which tell some parsers that reasoning is off.

        Raises:
            ToolsRefused: the parser rejects the tools.
        """
        reasons = grammar is None and self.reads_reasoning
        kind = self._parsers[bool(tools), reasons] if grammar is None else self._with_format
        more = {"chat_template_kwargs": dict(template_arguments)} if reasons else {}
        try:
            request = self._request(tools, messages, parallel, grammar)
            adjusted = kind(self._tokenizer, request.tools, **more).adjust_request(request)
        except (ValueError, TypeError, RuntimeError) as error:  # types that pydantic and xgrammar raise
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise ToolsRefused(
                f"the tool parser rejects these tools: {lines[0][:200]}", field="tools"
            ) from None
        outputs = adjusted.structured_outputs
        tag = None if outputs is None else outputs.structural_tag
        # The parser of outputs without reasoning, used if the reasoning has already ended in the prompt.
        plain = self._parsers.get((bool(tools), False))

        def reader(prompt: Sequence[int]) -> AnswerReader:
            return _InLongerPieces(parser_of(prompt))

        def parser_of(prompt: Sequence[int]) -> _Reader | _InTwoSteps:
            parser = kind(self._tokenizer, adjusted.tools, **more)
            ended = parser.is_reasoning_end(list(prompt)) if reasons else False
            if ended or (ended is None and tools):
                other = None if plain is None else plain(self._tokenizer, adjusted.tools)
                after = _Reader(other, adjusted, parallel, [], reasons=False)
                if ended:
                    return after
                parser = self._parsers[False, True](self._tokenizer, None, **more)
                return _InTwoSteps(_Reader(parser, adjusted, parallel, list(prompt), reasons=True), after)
            return _Reader(parser, adjusted, parallel, list(prompt), reasons=reasons)

        return ToolUse(
            tuple(tools),
            grammar if tag is None else Grammar("structural_tag", tag),
            not adjusted.skip_special_tokens,
            reader,
            reasons,
        )

    def _request(
        self,
        tools: Sequence[ToolDict],
        messages: Sequence[Mapping[str, Any]],
        parallel: bool,
        grammar: Grammar | None,
    ) -> Any:
        # Imported here, because vLLM is optional. A VLLMOutputParser exists only if vLLM is installed.
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        more: dict[str, Any] = {}
        if tools:
            more = {"tools": [dict(tool) for tool in tools], "tool_choice": "auto"}
        if grammar is not None:
            more["structured_outputs"] = {_FIELDS[grammar.kind]: _constraint(grammar)}
        return ChatCompletionRequest.model_validate(
            {
                "model": "",
                # Some parsers number the calls of the whole conversation, so they need the earlier calls.
                "messages": [
                    {"role": "user", "content": ""},
                    *(dict(message) for message in messages if message.get("tool_calls")),
                ],
                "parallel_tool_calls": parallel,
                **more,
            }
        )


# Fields of vLLM's StructuredOutputsParams by the kinds of our grammars.
_FIELDS = {
    "json_schema": "json", "json_object": "json_object", "regex": "regex", "choice": "choice",
    "grammar": "grammar", "structural_tag": "structural_tag",
}  # fmt: skip


def _constraint(grammar: Grammar) -> Any:
    if grammar.kind == "json_object":
        return True
    return json.loads(grammar.text) if grammar.kind == "choice" else grammar.text


class _InLongerPieces:
    """A reader of model output that joins small pieces of a long text, so that parsing takes linear time."""

    def __init__(self, reader: _Reader | _InTwoSteps) -> None:
        self._reader = reader
        self._parsed = 0  # number of characters that the reader has received
        self._text, self._token_ids = "", list[int]()  # output that waits to be parsed with the next pieces
        self.reasoning_tokens = 0

    def whole(self, text: str, token_ids: Sequence[int]) -> Parsed:
        parsed = self._reader.whole(text, token_ids)
        self.reasoning_tokens = self._reader.reasoning_tokens
        return parsed

    def push(self, text: str, token_ids: Sequence[int], *, finished: bool) -> Parsed:
        self._text += text
        self._token_ids += token_ids
        is_long = self._parsed >= _UNJOINED_CHARACTERS
        if is_long and not finished and len(self._text) * _PIECE_SHARE < self._parsed:
            return Parsed()
        text, token_ids = self._text, self._token_ids
        self._parsed += len(text)
        self._text, self._token_ids = "", []
        parsed = self._reader.push(text, token_ids, finished=finished)
        self.reasoning_tokens = self._reader.reasoning_tokens
        return parsed


class _InTwoSteps:
    """A reader that first separates the reasoning of an output, then reads tool calls from the rest.

    Some of vLLM's reasoning parsers never report that the reasoning has ended (granite). vLLM's composed parser
    then never looks for tool calls in a stream.
    """

    def __init__(self, reasoning: _Reader, calls: _Reader) -> None:
        self._first, self._then = reasoning, calls
        self.reasoning_tokens = 0

    def whole(self, text: str, token_ids: Sequence[int]) -> Parsed:
        text, _, reasoning = self._first.whole(text, token_ids)
        self.reasoning_tokens = self._first.reasoning_tokens
        return self._then.whole(text, token_ids)._replace(reasoning=reasoning)

    def push(self, text: str, token_ids: Sequence[int], *, finished: bool) -> Parsed:
        text, _, reasoning = self._first.push(text, token_ids, finished=finished)
        self.reasoning_tokens = self._first.reasoning_tokens
        if not text and not finished:
            return Parsed(reasoning=reasoning)
        return self._then.push(text, token_ids, finished=finished)._replace(reasoning=reasoning)


class _Reader:
    """A reader of one model output's tool calls and reasoning; without a ``parser`` all output is text."""

    def __init__(
        self, parser: Any | None, request: Any, parallel: bool, prompt: list[int], *, reasons: bool
    ) -> None:
        self._parser, self._request, self._parallel = parser, request, parallel
        self._prompt, self._reasons = prompt, reasons
        self._named: set[int] = set()
        self._token_ids: list[int] = []
        self._reasoning, self._has_content = "", False
        self.reasoning_tokens = 0

    def whole(self, text: str, token_ids: Sequence[int]) -> Parsed:
        if self._parser is None:
            return Parsed(text)
        self._parser.set_prompt_token_ids(self._prompt)
        reasoning, content, calls = self._parser.parse(
            text,
            self._request,
            enable_auto_tools=bool(self._request.tools),
            model_output_token_ids=list(token_ids),
        )
        found = [
            CallDelta(index, call.arguments, call.id or new_call_id(), call.name)
            for index, call in enumerate(calls or ())
        ]
        self._token_ids = list(token_ids)
        self._reasoning, self._has_content = reasoning or "", bool(content or found)
        self._count()
        return Parsed(content or "", found if self._parallel else found[:1], reasoning or "")

    def push(self, text: str, token_ids: Sequence[int], *, finished: bool) -> Parsed:
        if self._parser is None:
            return Parsed(text)
        message = self._parser.parse_delta(
            text, list(token_ids), self._request, self._prompt, finished=finished
        )
        if self._reasons:
            self._token_ids += token_ids
        if message is None:
            parsed = Parsed()
        else:
            calls = [
                delta
                for call in message.tool_calls
                if (self._parallel or call.index == 0) and (delta := self._delta(call)) is not None
            ]
            parsed = Parsed(message.content or "", calls, message.reasoning or "")
        self._reasoning += parsed.reasoning
        self._has_content = self._has_content or bool(parsed.text or parsed.calls)
        if finished:
            self._count()
        return parsed

    def _count(self) -> None:
        """Set ``reasoning_tokens`` to the number of tokens before the first token of the content.

        Some of vLLM's parsers find the reasoning in the text, and do not know the tokens of the content
        (granite, hunyuan_a13b, olmo3). For these, the tokens up to the end of the reasoning's text count.
        """
        if not self._reasoning or self._parser is None:
            return
        parser, ids = self._parser.reasoning_parser, self._token_ids
        if parser is None:
            self.reasoning_tokens = self._parser.count_reasoning_tokens(ids)
        elif content := parser.extract_content_ids(ids):
            self.reasoning_tokens = len(ids) - len(content)
        elif not self._has_content:
            self.reasoning_tokens = len(ids)
        else:
            decode = parser.model_tokenizer.decode
            ends = bisect_left(range(len(ids)), True, key=lambda end: self._reasoning in decode(ids[:end]))
            self.reasoning_tokens = ends

    def _delta(self, call: Any) -> CallDelta | None:
        """Return vLLM's delta of one tool call; as in OpenAI's API, only its first delta has name and id."""
        function = call.function
        name = (function.name if function else None) or None
        if name is not None and call.index not in self._named:
            self._named.add(call.index)
            return CallDelta(call.index, function.arguments or "", call.id or new_call_id(), name)
        arguments = (function.arguments if function else None) or ""
        return CallDelta(call.index, arguments) if arguments else None
