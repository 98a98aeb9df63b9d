"""Module patterns of a quantization_config: which modules stay unquantized or have their own format.

The patterns use the module names of the code that wrote the checkpoint. These may differ from the names in
transformers 5. Both are converted to the same spelling before they are compared.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from tonnage.planner.errors import UnsupportedArchitecture
from tonnage.planner.model.fields import shown

_PREFIXES = re.compile(r"^(?:(?:model|language_model|backbone|transformer|thinker)\.)+")
_RENAMED = (("block_sparse_moe", "mlp"), (".ffn.", ".mlp."), (".attn.", ".self_attn."), ("feed_forward", "mlp"))
# Regular expressions in published files use only these characters. Expressions with repeated groups are
# refused, because matching can take exponential time.
_PLAIN_REGEX = r"[\w\s.\\*+?$^()|\[\]{},:!=-]{1,2000}"
_NESTED = r"[)\]}*+?]\s*[*+{]"
MAX_PATTERNS = 200_000


@cache
def spelling(name: str) -> str:
    """Return a module's name in normalized spelling: wrapper prefixes removed, MLPs renamed to `mlp`."""
    name = _PREFIXES.sub("", name)
    for old, new in _RENAMED:
        name = name.replace(old, new)
    return "lm_head" if name == "head" else name


@dataclass(frozen=True, slots=True)
class Patterns:
    """Patterns of module names, compiled so that a match takes few dictionary look-ups.

    Attributes:
        names: names of modules; every module below such a module matches too.
        starts: prefixes of names, from globs with one star at the end.
        tails: last components of names, such as `lm_head` and `gate`.
        regex: all other patterns, joined into one expression.
    """

    names: frozenset[str] = frozenset()
    starts: tuple[str, ...] = ()
    tails: frozenset[str] = frozenset()
    regex: re.Pattern[str] | None = None

    def match(self, module: str) -> bool:
        """Return whether one of the patterns matches the module's name or the name of a module above it."""
        name = spelling(module)
        if name in self.names or name.startswith(self.starts):
            return True
        pieces = name.split(".")
        if not self.tails.isdisjoint(pieces[-1:]) or any(
            ".".join(pieces[:k]) in self.names for k in range(1, len(pieces))
        ):
            return True
        return self.regex is not None and (self.regex.match(name) or self.regex.match(module)) is not None


def compile_patterns(values: Iterable[str], field: str) -> Patterns:
    """Compile a quantization config's module names, globs (`*.attn.*`) and regular expressions (`re:...`).

    Raises:
        UnsupportedArchitecture: an entry has another form, or is a regular expression that could run endlessly.
    """
    names, starts, tails, expressions = set(), [], set(), []
    for count, value in enumerate(values):
        if count > MAX_PATTERNS:
            raise UnsupportedArchitecture(f"the list has more than {MAX_PATTERNS:,} entries", field=field)
        if value.startswith("re:"):
            expressions.append(_regex(value[3:], field))
        elif re.fullmatch(r"[\w-]+", value, re.ASCII):
            tails.add(spelling(value))
            names.add(spelling(value))
        elif re.fullmatch(r"[\w.-]+", value, re.ASCII):
            names.add(spelling(value))
        elif re.fullmatch(r"[\w.-]+\*", value, re.ASCII):
            starts.append(spelling(value[:-1]))
        elif re.fullmatch(r"[\w.*?-]{1,200}", value, re.ASCII):
            text = re.escape(value).replace(r"\*", ".*").replace(r"\?", ".")
            expressions.append(text if value.endswith("*") else rf"{text}(\.|$)")
        else:
            raise UnsupportedArchitecture(f"{shown(value)} is not a plain module name", field=field)
    joined = "|".join(f"(?:{expression})" for expression in expressions)
    return Patterns(frozenset(names), tuple(starts), frozenset(tails), re.compile(joined) if joined else None)


def _regex(text: str, field: str) -> str:
    """Return the regular expression `text` of a config, or raise an error if it could run endlessly."""
    if not re.fullmatch(_PLAIN_REGEX, text, re.ASCII) or re.search(_NESTED, text.replace(".*", ".")):
        raise UnsupportedArchitecture(f"{shown(text)} is not a simple regular expression", field=field)
    try:
        re.compile(text)
    except re.error as error:
        raise UnsupportedArchitecture(f"{shown(text)}: {error}", field=field) from None
    return text
