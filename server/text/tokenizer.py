"""Tokenizer, incremental detokenizer and stop strings, without torch and transformers."""

from __future__ import annotations

import codecs
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as RustTokenizer

from tonnage.planner.errors import CheckpointError, ConfigError

# U+FFFD at the end of a text may be a character whose last bytes are still missing. Byte-fallback decoders show
# several U+FFFD until the character is complete. A run of this many U+FFFD stands for invalid bytes, which no
# further token will complete.
_MAX_HELD = 64
# Number of tokens at the prompt's end that decoding needs: two characters of four bytes, one token per byte.
_PROMPT_END = 8
_REPLACEMENT = "\ufffd"

# Special tokens for fill-in-the-middle: before the prompt, before the suffix and before the answer. Sources:
# StarCoder and Granite code (arXiv:2305.06161); Qwen2.5-Coder and CodeGemma (model cards); DeepSeek-Coder (its
# README).
_FIM_TOKENS = (
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),
)


class Tokenizer:
    """The tokenizer from a model folder, with the ids of the end-of-sequence (EOS) tokens."""

    def __init__(self, rust: RustTokenizer, eos_token_ids: tuple[int, ...]) -> None:
        self._rust = rust
        self.eos_token_ids = eos_token_ids
        self._byte_level = "ByteLevel" in repr(rust.decoder)
        # True for the plain ByteLevel decoder, which joins the bytes of tokens: the bytes of a text are then
        # those of its tokens, one after the other.
        self.joins_bytes = repr(rust.decoder).startswith("ByteLevel(")
        self._special = {
            token_id for token_id, token in rust.get_added_tokens_decoder().items() if token.special
        }
        # cache of shown_bytes: token id -> bytes that it adds to a text, empty for special tokens
        self._shown_bytes: dict[int, bytes] = {}

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """Load tokenizer.json, with the EOS ids from generation_config.json or else config.json.

        Raises:
            CheckpointError: tokenizer.json is missing or invalid.
            ConfigError: An EOS id is invalid.
        """
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(
                f"{folder} has no tokenizer.json",
                field="tokenizer.json",
                hint="save the model's tokenizer in the fast format into its folder",
            )
        try:
            rust = RustTokenizer.from_file(str(path))
        except Exception as error:  # the tokenizers library raises plain Exception for an invalid file
            raise CheckpointError(f"{path}: {str(error)[:200]}", field="tokenizer.json") from None
        # The file's truncation and padding are training settings, which would silently cut long prompts and pad
        # short ones.
        rust.no_truncation()
        rust.no_padding()
        return cls(rust, _eos_token_ids(folder))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text.

        By default they include the special tokens that the model's own tokenizer adds, such as BOS.
        """
        ids: list[int] = self._rust.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def encode_all(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Return the token ids of several texts, without blocking other threads.

        tokenizers 0.23 releases the GIL only in its batch methods, not in ``encode`` and ``decode``.
        """
        found = self._rust.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in found]

    def encode_pairs(
        self, pairs: Sequence[tuple[str, str]], add_special_tokens: bool = True
    ) -> list[tuple[list[int], int | None]]:
        """Return the token ids of pairs of texts, joined with the tokenizer's special tokens.

        Each pair also has the index of its first token of type 1, with which the second text begins. The index
        is None if the tokenizer has no token types. The call does not block other threads.
        """
        found = self._rust.encode_batch_fast(list(pairs), add_special_tokens=add_special_tokens)
        return [(pair.ids, pair.type_ids.index(1) if 1 in pair.type_ids else None) for pair in found]

    def fill_in_the_middle(self, prompt: str, suffix: str) -> str | None:
        """Return the prompt that makes the model generate the text between ``prompt`` and ``suffix``.

        Returns None when the model has no fill-in-the-middle tokens.
        """
        for before, after, middle in _FIM_TOKENS:
            if all(self._rust.token_to_id(token) is not None for token in (before, after, middle)):
                return f"{before}{prompt}{after}{suffix}{middle}"
        return None

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of ``token_ids`` without special tokens; incomplete UTF-8 becomes U+FFFD."""
        text: str = self._rust.decode(list(token_ids))
        return text

    def decode_without_gil(self, token_ids: Sequence[int]) -> str:
        """Return the text of ``token_ids`` as ``decode`` does, but without holding the GIL."""
        (text,) = self._rust.decode_batch([list(token_ids)])
        return str(text)

    def decode_all(self, token_ids: Sequence[int]) -> str:
        """Return the text of ``token_ids`` including special tokens."""
        text: str = self._rust.decode(list(token_ids), skip_special_tokens=False)
        return text

    def shown_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to a text without special tokens; empty for a special token.

        Only tokenizers with a byte-level decoder support this.
        """
        found = self._shown_bytes.get(token_id)
        if found is None:
            found = b"" if token_id in self._special else self.token_bytes(token_id)
            self._shown_bytes[token_id] = found
        return found

    def bad_word_ids(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Return the token ids of each bad word, as encoded at the beginning of a text and after a space.

        The encoding after a space is included only if it has another first token and as many tokens as the
        encoding at the beginning, as in vLLM 0.32 (sampling_params.py: update_from_tokenizer).
        """
        found: list[tuple[int, ...]] = []
        for word in words:
            first = tuple(self.encode(word.lstrip(), add_special_tokens=False))
            spaced = tuple(self.encode(f" {word.lstrip()}", add_special_tokens=False))
            found += [first] if first else []
            if first and spaced[0] != first[0] and len(spaced) == len(first):
                found.append(spaced)
        return tuple(found)

    def is_special(self, token_id: int) -> bool:
        """Return whether a token is special, so that a text omits it by default."""
        return token_id in self._special

    def token_text(self, token_id: int) -> str:
        """Return the text of one token, special tokens included; part of a character becomes U+FFFD."""
        text: str = self._rust.decode([token_id], skip_special_tokens=False)
        return text

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """Return the text of each token, decoded on its own, without blocking other threads."""
        texts: list[str] = self._rust.decode_batch([[token] for token in token_ids], skip_special_tokens=False)
        return texts

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token stands for, which may be only a part of a character."""
        token = self._rust.id_to_token(token_id) or ""
        # a byte-fallback token of a SentencePiece vocabulary, such as <0x0A>
        if len(token) == 6 and token.startswith("<0x"):
            return bytes([int(token[3:5], 16)])
        if self._byte_level and all(character in _BYTE_OF for character in token):
            return bytes(_BYTE_OF[character] for character in token)
        return self.token_text(token_id).encode()


def _byte_level_alphabet() -> dict[str, int]:
    """Return GPT-2's table from printable characters to the bytes that they stand for.

    Printable bytes stand for themselves; all others have characters from U+0100.
    """
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printing]
    return {chr(byte): byte for byte in printing} | {chr(0x100 + at): byte for at, byte in enumerate(others)}


_BYTE_OF = _byte_level_alphabet()


def _eos_token_ids(folder: Path) -> tuple[int, ...]:
    for name in ("generation_config.json", "config.json"):
        try:
            config: Any = json.loads((folder / name).read_bytes())
        except FileNotFoundError:
            continue
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"not JSON: {error}", field=name) from None
        value = config.get("eos_token_id") if isinstance(config, dict) else None
        if value is None and isinstance(config, dict) and isinstance(config.get("text_config"), dict):
            value = config["text_config"].get("eos_token_id")
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in ids):
            raise ConfigError(f"{value!r} is not a token id or a list of them", field=f"{name}: eos_token_id")
        return tuple(ids)
    return ()


def detokenizer(
    tokenizer: Tokenizer, prompt_token_ids: Sequence[int] = (), *, special_tokens: bool = False
) -> Detokenizer | ByteDetokenizer:
    """Return an incremental detokenizer for the tokens of one answer.

    Args:
        tokenizer: The model's tokenizer.
        prompt_token_ids: The prompt, whose end may affect how the first generated token is decoded.
        special_tokens: Whether the text includes special tokens.
    """
    kind = ByteDetokenizer if tokenizer.joins_bytes else Detokenizer
    return kind(tokenizer, prompt_token_ids, special_tokens=special_tokens)


class ByteDetokenizer:
    """Incremental detokenizer for byte-level BPE, which does a tenth of the work of ``Detokenizer``."""

    __slots__ = ("_decode", "_shown_bytes")

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int] = (), *, special_tokens: bool = False
    ) -> None:
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._shown_bytes = tokenizer.token_bytes if special_tokens else tokenizer.shown_bytes
        # Decode the prompt's end first, because the answer may complete a character that the prompt began.
        self._decode(b"".join(map(self._shown_bytes, prompt_token_ids[-_PROMPT_END:])))

    def push(self, token_ids: Sequence[int]) -> str:
        """Add the answer's next ``token_ids`` and return the new text, up to its last complete character."""
        return self._decode(b"".join(map(self._shown_bytes, token_ids)))

    def flush(self) -> str:
        """End the answer and return the text that was held back as an incomplete character."""
        return self._decode(b"", True)


class Detokenizer:
    """Incremental detokenizer for tokenizers with any decoder; it never returns a part of a character.

    The returned pieces, including that of ``flush``, join to the text of all ids decoded at once. Each step
    decodes only the last few tokens. ``_ids`` begins where a piece began, because decoders treat their first
    token specially (SentencePiece strips its space).

    ``tokenizers.decoders.DecodeStream`` is not used. It has no flush, so an answer cut inside a character loses
    its end. It also raises an error when a decoder rewrites earlier text.
    """

    __slots__ = ("_decode", "_ids", "_read", "_shown")

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int] = (), *, special_tokens: bool = False
    ) -> None:
        self._decode = tokenizer.decode_all if special_tokens else tokenizer.decode
        self._ids = _context(tokenizer, prompt_token_ids)
        # number of tokens in _ids whose text has been returned
        self._read = len(self._ids)

        # number of characters of the text of _ids that have been returned
        self._shown = len(self._decode(self._ids)) if self._ids else 0

    def push(self, token_ids: Sequence[int]) -> str:
        """Add the answer's next ``token_ids`` and return the new text, up to its last complete character."""
        self._ids.extend(token_ids)
        text = self._decode(self._ids)
        unfinished = len(text) - len(text.rstrip(_REPLACEMENT))
        if unfinished > _MAX_HELD:
            unfinished = 0
        certain = len(text) - unfinished
        piece = text[self._shown : certain]
        if piece and not unfinished:
            self._ids = self._ids[self._read :]
            self._read = len(self._ids)
            self._shown = len(self._decode(self._ids))
        else:
            self._shown = max(self._shown, certain)
        return piece

    def flush(self) -> str:
        """End the answer and return the text that was held back as an incomplete character."""
        text = self._decode(self._ids)
        piece = text[self._shown :]
        self._shown = max(self._shown, len(text))
        return piece


def _context(tokenizer: Tokenizer, prompt_token_ids: Sequence[int]) -> list[int]:
    """Return the last tokens of the prompt that are decoded together with the answer.

    They are the fewest tokens whose text begins with a complete character. Some decoders strip the leading
    space of their first token, so decoding these tokens first keeps the space of the first generated token.
    """
    for size in range(1, min(_PROMPT_END, len(prompt_token_ids)) + 1):
        ids = list(prompt_token_ids[-size:])
        text = tokenizer.decode(ids)
        if text and not text.startswith(_REPLACEMENT):
            return ids
    return []
