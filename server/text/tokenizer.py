"""Text at the API's edge: tokenizer, incremental detokenizer, stop strings. No torch, no transformers."""

from __future__ import annotations

import codecs
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as RustTokenizer

from tonnage.planner.errors import CheckpointError, ConfigError

# U+FFFD at the end may be a character that is not finished yet; byte-fallback decoders show a whole run of byte
# tokens so until its last character is complete. So many in a row are invalid bytes that nothing will finish.
_MAX_HELD = 64
_PROMPT_END = 8  # tokens: two characters in single bytes
_REPLACEMENT = "\ufffd"

# Fill in the middle: what stands before the prompt, before the suffix and before the answer. StarCoder and
# Granite code (arXiv:2305.06161); Qwen2.5-Coder and CodeGemma (their model cards); DeepSeek-Coder (its README).
_FIM_TOKENS = (
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),
)


class Tokenizer:
    """tokenizer.json of a model folder, and the ids that end a text."""

    def __init__(self, rust: RustTokenizer, eos_token_ids: tuple[int, ...]) -> None:
        self._rust = rust
        self.eos_token_ids = eos_token_ids
        self._byte_level = "ByteLevel" in repr(rust.decoder)
        # Alone, that decoder joins the bytes of the tokens: a text is the sum of its pieces.
        self.joins_bytes = repr(rust.decoder).startswith("ByteLevel(")
        self._special = {
            token_id for token_id, token in rust.get_added_tokens_decoder().items() if token.special
        }
        self._shown_bytes: dict[int, bytes] = {}  # of the tokens that were met, special ones empty

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """Read tokenizer.json, and the EOS ids of generation_config.json or else config.json.

        Raises CheckpointError when tokenizer.json is missing or broken, ConfigError for a broken EOS id.
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
        except Exception as error:  # tokenizers raises bare Exception
            raise CheckpointError(f"{path}: {str(error)[:200]}", field="tokenizer.json") from None
        # What the file was trained with: a long prompt would be cut without a word, a short one filled up.
        rust.no_truncation()
        rust.no_padding()
        return cls(rust, _eos_token_ids(folder))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt, with the special tokens the model's own tokenizer adds."""
        ids: list[int] = self._rust.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def encode_all(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """As ``encode``, for a thread beside the event loop: other threads run meanwhile (tokenizers 0.23
        keeps the GIL in ``encode`` and ``decode``, not in their batches)."""
        found = self._rust.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in found]

    def between(self, prompt: str, suffix: str) -> str | None:
        """The text that asks a model for what stands between the two; None: this one has no tokens for it."""
        for before, after, middle in _FIM_TOKENS:
            if all(self._rust.token_to_id(token) is not None for token in (before, after, middle)):
                return f"{before}{prompt}{after}{suffix}{middle}"
        return None

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of ``token_ids`` without special tokens; unfinished UTF-8 shows as U+FFFD."""
        text: str = self._rust.decode(list(token_ids))
        return text

    def decode_apart(self, token_ids: Sequence[int]) -> str:
        """As ``decode``, for a thread beside the event loop."""
        (text,) = self._rust.decode_batch([list(token_ids)])
        return str(text)

    def decode_all(self, token_ids: Sequence[int]) -> str:
        """As ``decode``, with the special tokens."""
        text: str = self._rust.decode(list(token_ids), skip_special_tokens=False)
        return text

    def shown_bytes(self, token_id: int) -> bytes:
        """What a token adds to a text without special tokens, where texts are joined bytes."""
        found = self._shown_bytes.get(token_id)
        if found is None:
            found = b"" if token_id in self._special else self.token_bytes(token_id)
            self._shown_bytes[token_id] = found
        return found

    def token_text(self, token_id: int) -> str:
        """One token alone, special tokens too; part of a character shows as U+FFFD."""
        text: str = self._rust.decode([token_id], skip_special_tokens=False)
        return text

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """``token_text`` of each, for a thread beside the event loop."""
        texts: list[str] = self._rust.decode_batch([[token] for token in token_ids], skip_special_tokens=False)
        return texts

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for, also when they are only part of a character."""
        token = self._rust.id_to_token(token_id) or ""
        if len(token) == 6 and token.startswith("<0x"):  # byte fallback of SentencePiece vocabularies
            return bytes([int(token[3:5], 16)])
        if self._byte_level and all(character in _BYTE_OF for character in token):
            return bytes(_BYTE_OF[character] for character in token)
        return self.token_text(token_id).encode()


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins: bytes that print stand for themselves, the others follow from U+0100 on."""
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
        except ValueError as error:
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
    """For one answer after its prompt; ``special_tokens`` are part of the text or left out."""
    if tokenizer.joins_bytes:
        return ByteDetokenizer(tokenizer, prompt_token_ids, special_tokens=special_tokens)
    return Detokenizer(tokenizer, prompt_token_ids, special_tokens=special_tokens)


class ByteDetokenizer:
    """Detokenizer where a text is nothing but its tokens' bytes (byte-level BPE): a tenth of the work."""

    __slots__ = ("_decode", "_shown_bytes")

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int] = (), *, special_tokens: bool = False
    ) -> None:
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._shown_bytes = tokenizer.token_bytes if special_tokens else tokenizer.shown_bytes
        # A character that the prompt began is finished by the answer.
        self._decode(b"".join(map(self._shown_bytes, prompt_token_ids[-_PROMPT_END:])))

    def push(self, token_ids: Sequence[int]) -> str:
        """Text that became certain with ``token_ids``; may be empty."""
        return self._decode(b"".join(map(self._shown_bytes, token_ids)))

    def flush(self) -> str:
        """What was held back, at the end of the answer."""
        return self._decode(b"", True)


class Detokenizer:
    """Token ids in, text out, never half a character.

    The pieces joined, ``flush`` included, are the text of all the ids decoded at once. Each step decodes
    only the last few tokens: ``_ids`` begins where a piece began, because decoders look at their first token
    (SentencePiece ones strip its space). ``tokenizers.decoders.DecodeStream`` is not used: it has no flush
    (an answer cut in the middle of a character loses its end) and raises where a decoder rewrites earlier text.
    """

    __slots__ = ("_decode", "_ids", "_read", "_shown")

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int] = (), *, special_tokens: bool = False
    ) -> None:
        self._decode = tokenizer.decode_all if special_tokens else tokenizer.decode
        self._ids = _context(tokenizer, prompt_token_ids)
        self._read = len(self._ids)  # tokens of the window whose text is out
        self._shown = len(self._decode(self._ids)) if self._ids else 0  # characters of the window that are out

    def push(self, token_ids: Sequence[int]) -> str:
        """Text that became certain with ``token_ids``; may be empty."""
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
        """What was held back, at the end of the answer."""
        text = self._decode(self._ids)
        piece = text[self._shown :]
        self._shown = max(self._shown, len(text))
        return piece


def _context(tokenizer: Tokenizer, prompt_token_ids: Sequence[int]) -> list[int]:
    """The shortest end of the prompt that begins with a whole character, so that the first generated token
    keeps its leading space."""
    for size in range(1, min(_PROMPT_END, len(prompt_token_ids)) + 1):
        ids = list(prompt_token_ids[-size:])
        text = tokenizer.decode(ids)
        if text and not text.startswith(_REPLACEMENT):
            return ids
    return []


class StopStrings:
    """Cuts a text before the first stop string, wherever the pieces it comes in are split.

    Text that may be the beginning of a stop string is held back. Of several stop strings the one that is
    complete first wins (the longest of those that end together), so the result does not depend on the split.
    """

    __slots__ = ("_held", "_stop", "stopped")

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._held = ""
        self.stopped = False

    @property
    def active(self) -> bool:
        """Whether there is any stop string."""
        return bool(self._stop)

    def push(self, piece: str) -> str:
        """The text that may be shown now. Sets ``stopped`` when a stop string is complete."""
        if not self._stop or self.stopped:
            return "" if self.stopped else piece
        text = self._held + piece
        found = [(start + len(stop), start) for stop in self._stop if (start := text.find(stop)) >= 0]
        if found:
            self.stopped = True
            self._held = ""
            return text[: min(found)[1]]
        keep = max(_overlap(text, stop) for stop in self._stop)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """The text held back, when the answer ended without a stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that is a beginning of ``stop``."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
