"""The first tokens that all prompts with the same system prompt share, for ``--shared-system-prompt``."""

from __future__ import annotations

from pathlib import Path

from tonnage.planner.errors import DeploymentError
from tonnage.server.text.chat_template import ChatTemplate
from tonnage.server.text.tokenizer import Tokenizer


def shared_prefix(
    path: Path, folder: Path, block_size: int, chat_template: Path | None = None
) -> tuple[int, ...]:
    """Return the first tokens that all chats with the system prompt in the file ``path`` share.

    The chat template is the file ``chat_template``, or else the model's own. Without either, the text of the
    file ``path`` counts as the shared beginning of completion prompts.

    Raises:
        DeploymentError: ``path`` cannot be read, or its tokens do not fill one KV block of ``block_size``
            tokens.
    """
    field = "shared_system_prompt"
    try:
        text = path.read_text(encoding="utf-8").removesuffix("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DeploymentError(f"cannot read {path}: {getattr(error, 'strerror', error)}", field=field) from None
    tokenizer, template = Tokenizer.from_folder(folder), ChatTemplate.from_folder(folder, chat_template)
    prompts = [text, text]
    if template is not None:
        system = {"role": "system", "content": text}
        prompts = [template.render([system, {"role": "user", "content": word}]) for word in ("a", "0")]
    tokens = [tokenizer.encode(prompt, add_special_tokens=template is None) for prompt in prompts]
    ends = (at for at, pair in enumerate(zip(*tokens, strict=False)) if len(set(pair)) > 1)
    common = tokens[0][: next(ends, min(map(len, tokens)))]
    if len(common) < block_size:
        raise DeploymentError(
            f"{path} makes {len(common)} tokens, less than a KV block of {block_size}",
            field=field,
            hint="only full blocks are shared: remove the file from --shared-system-prompt",
        )
    return tuple(common)
