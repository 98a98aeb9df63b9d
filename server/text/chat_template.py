"""A model's chat template, which formats messages as the text of a prompt; it runs in Jinja's sandbox.

Templates are written for ``apply_chat_template`` of transformers (5.19, utils/chat_template_utils.py). The
Jinja environment here offers the same names without importing transformers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser

from tonnage.planner.errors import ConfigError, TonnageError
from tonnage.server.text.template_limits import MOST_CHARACTERS, BoundedEnvironment

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


# Exceptions that a template may raise when messages or arguments are not as it expects.
_FAULTS = (
    jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError,
    MemoryError,
)  # fmt: skip


# Chat templates that are part of the distribution: each has the name of the tool parser that reads its calls.
_SHIPPED = Path(__file__).with_name("templates")
SHIPPED = ("hermes", "llama3_json", "mistral")


class TemplateRefused(TonnageError):
    """Error for messages that the chat template rejects, such as roles that do not alternate."""

    code = "invalid_value"


class ChatTemplate:
    """A compiled chat template with the model's special tokens.

    ``tool_source`` is the source of a variant for requests with tools, or None.
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, str] | None = None, tool_source: str | None = None
    ) -> None:
        environment = BoundedEnvironment(extensions=[_Generation, jinja2.ext.loopcontrols])
        # Jinja's own filter tojson escapes HTML, which templates do not expect.
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._template = environment.from_string(source)
            with_tools = source if tool_source is None else tool_source
            self._tool_template = environment.from_string(with_tools)
            # whether the template uses ``tools``; otherwise it would silently ignore a request's tools
            self.knows_tools = "tools" in jinja2.meta.find_undeclared_variables(environment.parse(with_tools))
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"line {error.lineno}: {error.message}", field="chat_template") from None
        except (RecursionError, MemoryError, OverflowError) as error:
            raise ConfigError(
                f"too large or too deeply nested ({type(error).__name__})", field="chat_template"
            ) from None
        self._special_tokens = dict(special_tokens or {})

    @classmethod
    def from_folder(
        cls, folder: str | Path, file: Path | None = None, *, tool_template: str | None = None
    ) -> ChatTemplate | None:
        """Load a model's chat template; return None when the model has none.

        If ``file`` is given, it is the path of a template, or the name of a template in ``SHIPPED``. Otherwise
        the template is read from ``folder``: from chat_template.jinja (with
        additional_chat_templates/tool_use.jinja), or else from tokenizer_config.json. If that template does not
        show tools, the shipped template named ``tool_template`` replaces it for requests with tools.

        Raises:
            ConfigError: A file or template is invalid.
        """
        folder = Path(folder)
        config: Any = {}
        path = folder / "tokenizer_config.json"
        if path.is_file():
            try:
                config = json.loads(path.read_bytes())
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"not JSON: {error}", field="tokenizer_config.json") from None
        if not isinstance(config, dict):
            raise ConfigError("not a JSON object", field="tokenizer_config.json")
        source, with_tools = config.get("chat_template"), None
        if isinstance(source, list):  # the config's chat_template is a list of templates, each with a name
            named = {item.get("name"): item.get("template") for item in source if isinstance(item, dict)}
            source, with_tools = named.get("default"), named.get("tool_use")
        if (folder / "chat_template.jinja").is_file():
            source = (folder / "chat_template.jinja").read_text()
            more = folder / "additional_chat_templates" / "tool_use.jinja"
            with_tools = more.read_text() if more.is_file() else None
        if file is not None:
            source, with_tools = _read(file), None
        if source is None:
            return None
        if not isinstance(source, str) or not isinstance(with_tools, str | None):
            raise ConfigError("is not a string", field="tokenizer_config.json: chat_template")
        found = cls(source, _special_tokens(config), with_tools)
        if file is None and tool_template is not None and not found.knows_tools:
            return cls(source, _special_tokens(config), _read(Path(tool_template)))
        return found

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **more: Any,
    ) -> str:
        """Return the text of the prompt for a conversation; ``more`` are further variables of the template.

        Raises:
            TemplateRefused: The template rejects the conversation; the error has the template's own message.
        """
        template = self._tool_template if tools else self._template
        template.environment.start_render()  # type: ignore[attr-defined]
        try:
            pieces = template.generate(
                **self._special_tokens,
                **more,
                messages=messages,
                # tools is None instead of undefined, because templates test "tools is not none"
                tools=tools or None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
            )
            return _joined(pieces)
        except _FAULTS as error:
            raise TemplateRefused(
                f"the model's chat template rejects these messages: {str(error)[:200]}", field="messages"
            ) from None


def _read(file: Path) -> str:
    """Return the source of a chat template; ``file`` is a path, or the name of a shipped template."""
    if str(file) in SHIPPED and not file.exists():
        file = _SHIPPED / f"{file}.jinja"
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"cannot read {file}: {getattr(error, 'strerror', error)}",
            field="chat_template",
            hint=f"shipped templates: {', '.join(SHIPPED)}",
        ) from None


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    tokens = {}
    for name in _SPECIAL_TOKENS:
        value = config.get(name)
        if isinstance(value, dict):  # a special token that is stored as the JSON form of an AddedToken
            value = value.get("content")
        if isinstance(value, str):
            tokens[name] = value
    return tokens


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    # Indentation multiplies the size of deeply nested values, so only indented JSON is checked for its size.
    # Without indentation, its size is proportional to that of the request's body, which is limited.
    return encoder.encode(value) if indent is None else _joined(encoder.iterencode(value))


def _joined(pieces: Iterable[str]) -> str:
    """Return the joined pieces of a rendered prompt; raise TemplateError if they exceed ``MOST_CHARACTERS``."""
    parts: list[str] = []
    size = 0
    for piece in pieces:
        size += len(piece)
        if size > MOST_CHARACTERS:
            raise jinja2.TemplateError(f"the prompt would have more than {MOST_CHARACTERS:,} characters")
        parts.append(piece)
    return "".join(parts)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


class _Generation(jinja2.ext.Extension):
    """Jinja extension for the tag ``{% generation %}``, which marks assistant text for training.

    A server does not train, so the tag only renders its body.
    """

    tags = {"generation"}  # noqa: RUF012 -- jinja2 declares it as a plain set

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """Parse the tag, and return the nodes of its body up to ``endgeneration``."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
