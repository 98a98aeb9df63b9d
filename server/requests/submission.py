"""The part of a request that goes to the engine, and the counts of its tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

from tonnage.server.engines.request import SamplingParams


@dataclass(frozen=True, slots=True)
class Submission:
    """A request to the engine: ``n`` completions of each prompt.

    Attributes:
        prompts: Token ids of each prompt.
        params: Sampling parameters.
        n: Completions per prompt.
        stop: Strings that end a completion; they are not part of its text.
        cache_salt: The request's own salt for prefix caching.
        priority: The requested priority; None for the tenant's.
        special_tokens: Whether special tokens are part of the text, for parsers of tool calls.
        all_tokens: Whether deltas without text are yielded too, for parsers of tool calls.
        lora: Name of the adapter; empty for the model itself.
    """

    prompts: tuple[tuple[int, ...], ...]
    params: SamplingParams
    n: int = 1
    stop: tuple[str, ...] = ()
    cache_salt: str = ""
    priority: int | None = None
    special_tokens: bool = False
    all_tokens: bool = False
    lora: str = ""

    @property
    def sequences(self) -> int:
        """Number of completions over all prompts."""
        return len(self.prompts) * self.n

    @property
    def most_tokens(self) -> int:
        """Upper bound of the tokens it may use: every prompt once, every completion at its full length."""
        return sum(map(len, self.prompts)) + self.sequences * self.params.max_tokens


@dataclass(slots=True)
class TokenCounts:
    """Token counts of a submission so far; a stop token counts as a completion token, as in OpenAI's usage."""

    prompt: int = 0
    choices: list[int] = field(default_factory=list)  # completion tokens of each choice
    cached: dict[int, int] = field(default_factory=dict)  # prompt number -> tokens from the prefix cache

    @property
    def completion(self) -> int:
        """Completion tokens of all choices."""
        return sum(self.choices)

    @property
    def cached_total(self) -> int:
        """Prompt tokens of all prompts that came from the prefix cache."""
        return sum(self.cached.values())
