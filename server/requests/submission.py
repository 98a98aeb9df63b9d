"""The part of an API request that goes to the engine, and the counts of its tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

from tonnage.server.engines.request import SamplingParams


@dataclass(frozen=True, slots=True)
class Submission:
    """The part of an API request that goes to the engine: ``n`` completions of each of its prompts.

    Attributes:
        prompts: Token ids of each prompt.
        params: Sampling parameters.
        n: Number of completions per prompt.
        stop: Strings that end a completion; its text includes them only if ``shows_stop`` is set.
        cache_salt: A salt from the request, which limits prefix cache hits to requests with the same salt.
        priority: The requested priority; None uses the tenant's default.
        special_tokens: Whether the text includes special tokens, which some parsers of tool calls need.
        all_tokens: Whether tokens without text are reported as well, which some parsers of tool calls need.
        lora: Name of the LoRA adapter; empty for the base model.
        field: Field of the request's body that has the prompt, for errors.
        shows_stop: Whether the text ends with the stop string that ended it.
        second_texts: For each prompt, the index of the first token of the second of its two texts, or None for
            a model without token types; empty if each prompt is a single text.
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
    field: str = "prompt"
    shows_stop: bool = False
    second_texts: tuple[int | None, ...] = ()

    @property
    def sequences(self) -> int:
        """Number of completions over all prompts: ``n`` for each prompt."""
        return len(self.prompts) * self.n

    @property
    def most_tokens(self) -> int:
        """Upper bound of the request's tokens: each prompt once, and each completion at ``max_tokens``."""
        return sum(map(len, self.prompts)) + self.sequences * self.params.max_tokens


@dataclass(slots=True)
class TokenCounts:
    """Token counts of a request so far.

    A stop token counts as a completion token, as in OpenAI's usage.
    """

    prompt: int = 0
    # number of completion tokens of each choice
    choices: list[int] = field(default_factory=list)

    # index of a prompt -> number of its tokens found in the prefix cache
    cached: dict[int, int] = field(default_factory=dict)
    # number of completion tokens of the reasoning; None when the answers are not searched for reasoning
    reasoning: int | None = None

    @property
    def completion(self) -> int:
        """Number of completion tokens of all choices."""
        return sum(self.choices)

    @property
    def cached_total(self) -> int:
        """Number of prompt tokens, over all prompts, that were found in the prefix cache."""
        return sum(self.cached.values())
