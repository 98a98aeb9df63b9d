"""Jinja's sandbox with limits on the work and the memory of one rendering.

Jinja's own sandbox limits ``range`` and access to attributes. A chat template comes with a model, and may still
multiply strings or nest loops without end. Here every loop is counted, and operations that make a text larger
are checked before they run. Constants are not computed while a template is compiled.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import jinja2
import jinja2.compiler
import jinja2.filters
import jinja2.nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

# Upper bound of the characters of a prompt that a template produces, and of each text that it computes: twice
# the default limit of a request body. A conversation that is written once fits; JSON that indentation expands
# may not.
MOST_CHARACTERS = 2**24
# Upper bound of the iterations of all loops while a template renders. A template goes a few times through the
# messages of a request, of which there are at most 10,000 (api/json_body.py). A million iterations take a fifth
# of a second.
MOST_ROUNDS = 2**20
# Matches a field width of seven digits or more in a format string, which would pad a text to megabytes.
_WIDE = re.compile(r"[%{][^%{}]*\d{7}")
# Matches a format string that takes a field width from a value: "%*d", "{:{}}".
_WIDTH_OF_VALUE = re.compile(r"%[^a-zA-Z%]*\*|:[^{}]*\{")

# Upper bound of the bits of a number, more than any template needs. Without it, a power of a power would fill
# the memory.
_MOST_BITS = 4096


class _CountedLoops(jinja2.compiler.CodeGenerator):
    """Jinja's code generator, changed to pass loops and concatenations of a template through size checks."""

    def _output_child_to_const(self, node: Any, frame: Any, finalize: Any) -> str:
        """Write literal text of the template as it is; raise Impossible for other constants.

        Jinja then computes them while it renders, where the limits apply.
        """
        if not isinstance(node, jinja2.nodes.TemplateData):
            raise jinja2.nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)

    def visit_For(self, node: jinja2.nodes.For, frame: Any) -> None:
        """Compile a template's loop so that its iterations are counted while the template renders."""
        node.iter = _called("counted", node.iter)
        super().visit_For(node, frame)

    def visit_Concat(self, node: jinja2.nodes.Concat, frame: Any) -> None:
        """Compile a template's ``a ~ b`` (concatenation) so that the size of its result is checked."""
        self.visit(_called("concatenated", *node.nodes), frame)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox for chat templates, with limits on loops and on sizes.

    A template that exceeds a limit raises TemplateError while it renders.
    """

    code_generator_class = _CountedLoops
    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self, **options: Any) -> None:
        # Without the optimizer, Jinja computes no constant such as 'x' * 10**9 while it compiles.
        super().__init__(trim_blocks=True, lstrip_blocks=True, optimized=False, **options)
        self.filters |= {"center": _center, "indent": _indent, "format": _format}
        self._of_thread = threading.local()  # counted per thread, because requests render at the same time

    def start_render(self) -> None:
        """Reset this thread's count of loop iterations, before the thread renders a chat template."""
        self._of_thread.rounds = 0

    def counted(self, values: Iterable[Any]) -> Iterator[Any]:
        """Yield a template loop's values; raise TemplateError when all loops exceed MOST_ROUNDS iterations."""
        mine = self._of_thread
        for value in values:
            mine.rounds = getattr(mine, "rounds", 0) + 1
            if mine.rounds > MOST_ROUNDS:
                raise jinja2.TemplateError(f"the template's loops have more than {MOST_ROUNDS:,} iterations")
            yield value

    def concatenated(self, *values: Any) -> str:
        """Return the concatenated values (a template's ``a ~ b``); raise TemplateError if they are too long."""
        texts = [str(value) for value in values]
        _check_size(sum(map(len, texts)))
        return "".join(texts)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute a template's ``left operator right``; raise TemplateError if the result is too large."""
        if operator == "+" and isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
            _check_size(len(left) + len(right))
        elif operator == "*":
            for many, times in ((left, right), (right, left)):
                if isinstance(many, str | bytes | list | tuple) and isinstance(times, int):
                    _check_size(len(many) * times)
        elif operator == "%" and isinstance(left, str):
            _check_widths(left, right)
        if operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
            if bits > _MOST_BITS:
                raise jinja2.TemplateError(f"a number in the template has more than {_MOST_BITS:,} bits")
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, obj: Any, /, *args: Any, **named: Any) -> Any:
        """Call ``obj`` for a template, unless it is a string method whose result would be too large.

        Raises:
            TemplateError: The result would be too large.
        """
        method = getattr(obj, "__wrapped__", obj)  # str.format, which Jinja's sandbox replaces by a wrapper
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str):
            _check_method(owner, method.__name__, (*args, *named.values()))
        return super().call(context, obj, *args, **named)


def _called(method: str, *values: Any) -> jinja2.nodes.Call:
    """Return a syntax tree node of Jinja that calls the method ``method`` of the template's environment."""
    return jinja2.nodes.Call(jinja2.nodes.EnvironmentAttribute(method), list(values), [], None, None)


def _check_size(size: int) -> None:
    if size > MOST_CHARACTERS:
        raise jinja2.TemplateError(
            f"a text in the template would have more than {MOST_CHARACTERS:,} characters"
        )


def _check_widths(form: str, values: Any) -> None:
    """Raise TemplateError for a huge field width in the format string ``form``, or among its ``values``."""
    several = values if isinstance(values, tuple) else (values,)
    large = any(isinstance(value, int) and abs(value) > MOST_CHARACTERS for value in several)
    if _WIDE.search(form) or (large and _WIDTH_OF_VALUE.search(form)):
        raise jinja2.TemplateError("a width in a format string of the template is too large")


def _check_method(text: str, method: str, values: tuple[Any, ...]) -> None:
    """Raise TemplateError for a call of a string method of ``text`` whose result would be too large."""
    if method in ("format", "format_map"):
        _check_widths(text, values)
    elif method == "join" and values and isinstance(values[0], list | tuple):
        _check_size(len(text) * len(values[0]) + sum(len(each) for each in values[0] if isinstance(each, str)))
    elif method == "replace" and len(values) > 1 and isinstance(values[0], str) and isinstance(values[1], str):
        _check_size(len(text) + len(values[1]) * text.count(values[0]))
    elif method != "encode":  # methods that pad: ljust, center, zfill, expandtabs ...
        for value in values:
            if isinstance(value, int):
                _check_size(abs(value) * (text.count("\t") if method == "expandtabs" else 1))


def _center(value: str, width: int = 80) -> str:
    _check_size(width)
    return jinja2.filters.do_center(value, width)


def _indent(s: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    _check_size((s.count("\n") + 1) * (width if isinstance(width, int) else len(width)))
    return jinja2.filters.do_indent(s, width, first, blank)


def _format(value: str, *args: Any, **named: Any) -> str:
    _check_widths(value, (*args, *named.values()))
    return jinja2.filters.do_format(value, *args, **named)
