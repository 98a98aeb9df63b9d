"""Pairs of texts as prompts of a cross-encoder, in the forms that vLLM 0.32 gives them.

The source is CrossEncoderIOProcessor.get_score_prompt in entrypoints/pooling/scoring/io_processor.py. The first
form that applies is used:

1. a template given with --chat-template, with the roles ``query`` and ``document``;
2. both texts joined by the tokenizer's special tokens;
3. both texts as one text, for a config with ``use_sep_token: false``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tonnage.server.api.chat.prompt import check_template_arguments
from tonnage.server.api.generation import Generator
from tonnage.server.api.pooling_run import check_input_length
from tonnage.server.state import ServerState


async def pair_prompts(
    state: ServerState,
    generator: Generator,
    pairs: Sequence[tuple[str, str]],
    *,
    add_special_tokens: bool,
    template_arguments: Mapping[str, Any],
    param: str,
) -> tuple[tuple[tuple[int, ...], ...], tuple[int | None, ...]]:
    """Return the prompt of each pair of texts, and the index of the first token of its second text.

    The index is None for a model without token types.

    Raises:
        ApiError: A text is too long, or a prompt is empty.
        TemplateRefused: The template rejects a pair.
    """
    texts = list(dict.fromkeys(text for pair in pairs for text in pair))
    await generator.check_characters(texts, param)
    # A text longer than the context is rejected before the prompts repeat it for hundreds of other texts.
    longest = max(texts, key=len)
    if len(longest) > state.max_model_len:
        check_input_length(state, len(await generator.encode(longest, add_special_tokens=False)), param)
    template = state.chat_template if state.settings.chat_template is not None else None
    if template is not None:
        check_template_arguments(template_arguments)

        def rendered() -> list[str]:
            return [
                template.render(
                    [{"role": "query", "content": query}, {"role": "document", "content": document}],
                    add_generation_prompt=False,
                    **template_arguments,
                )
                for query, document in pairs
            ]

        texts = await generator.in_thread(rendered)
    elif not state.classifier.separates:
        texts = [query + document for query, document in pairs]
    else:
        found = await generator.encode_pairs(pairs, add_special_tokens=add_special_tokens)
        prompts = tuple(ids for ids, _ in found)
        generator.check_token_ids(prompts, param)
        return prompts, tuple(second if state.classifier.has_types else None for _, second in found)
    prompts = await generator.encode_all(texts, add_special_tokens=add_special_tokens)
    generator.check_token_ids(prompts, param)
    return prompts, ()
