"""What a request of the API asks of the engine, and the tokens it came to."""

from __future__ import annotations

from dataclasses import dataclass, field

from tonnage.server.engines.request import SamplingParams


@dataclass(frozen=True, slots=True)
class Submission:
    """``n`` completions of each prompt. ``stop``: strings that end a completion and are not shown.

    For parsers of tool calls: ``special_tokens`` are part of the text; with ``all_tokens`` every delta comes,
    also one whose text is still held back.
    """

    prompts: tuple[tuple[int, ...], ...]
    params: SamplingParams
    n: int = 1
    stop: tuple[str, ...] = ()
    cache_salt: str = ""
    priority: int | None = None  # None: the tenant's
    special_tokens: bool = False
    all_tokens: bool = False
    lora: str = ""  # the adapter's name

    @property
    def sequences(self) -> int:
        return len(self.prompts) * self.n

    @property
    def most_tokens(self) -> int:
        """Tokens it may use: every prompt once, every completion to its end."""
        return sum(map(len, self.prompts)) + self.sequences * self.params.max_tokens


@dataclass(slots=True)
class TokenCounts:
    """Tokens of a submission so far. A stop token counts as a completion token, as in OpenAI's usage."""

    prompt: int = 0
    choices: list[int] = field(default_factory=list)  # completion tokens of each choice
    cached: dict[int, int] = field(default_factory=dict)  # prompt number -> tokens from the prefix cache

    @property
    def completion(self) -> int:
        """Completion tokens of all choices."""
        return sum(self.choices)

    @property
    def cached_total(self) -> int:
        return sum(self.cached.values())
