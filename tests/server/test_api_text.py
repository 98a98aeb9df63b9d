"""Detokenizer and stop strings against decoding everything at once."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models

from tonnage.planner.errors import CheckpointError, ConfigError
from tonnage.server.api.logprobs import CompletionLogprobs
from tonnage.server.engines.chunk import TokenLogprobs
from tonnage.server.text.stop_strings import StopAutomaton, StopStrings
from tonnage.server.text.tokenizer import Tokenizer, detokenizer


def pieces(tokenizer: Tokenizer, ids: list[int], step: int = 1, prompt: list[int] | None = None) -> list[str]:
    stream = detokenizer(tokenizer, prompt or [])
    out = [stream.push(ids[at : at + step]) for at in range(0, len(ids), step)]
    return [*out, stream.flush()]


@settings(deadline=None)
@given(data=st.data())
def test_streamed_detokenization_equals_decoding_all_tokens(tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, 49151) | st.integers(17, 300), max_size=40))
    step = data.draw(st.integers(1, 5))
    assert "".join(pieces(tokenizer, ids, step)) == tokenizer.decode(ids)


@pytest.mark.parametrize("text", ["naïve café", "👩‍👩‍👧 family", "日本語のテキスト", "a€b𐍈c", "tab\tnew\nline"])
def test_streamed_text_never_splits_a_character(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    out = pieces(tokenizer, ids)
    assert "".join(out) == text
    assert not any("\ufffd" in piece for piece in out)


def test_output_truncated_inside_a_character_keeps_its_last_bytes(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("ok 👩")
    assert len(ids) > 3
    out = pieces(tokenizer, ids[:-1])
    assert "".join(out) == tokenizer.decode(ids[:-1])
    assert out[-1] == "\ufffd"


def test_output_can_complete_a_character_whose_first_bytes_end_the_prompt(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("ok 👩 fine")
    for at in range(1, len(ids)):
        begun = tokenizer.decode(ids[:at]).rstrip("\ufffd")
        assert begun + "".join(pieces(tokenizer, ids[at:], prompt=ids[:at])) == "ok 👩 fine"


def byte_fallback_tokenizer() -> Tokenizer:
    """Return a SentencePiece-like tokenizer: metaspace, one token per byte of unknown words."""
    vocab = {"<unk>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)}
    vocab |= {"▁hello": 257, "▁world": 258, "!": 259}
    rust = RustTokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    rust.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(rust, ())


def test_byte_fallback_tokens_decode_to_whole_characters_and_spaces() -> None:
    tokenizer = byte_fallback_tokenizer()
    ids = [257, 258, *(byte + 1 for byte in "€👩".encode()), 258, 259]
    out = pieces(tokenizer, ids)
    assert "".join(out) == "hello world€👩 world!" == tokenizer.decode(ids)
    assert "€" in out
    assert "👩" in out


def test_completion_text_keeps_its_leading_space() -> None:
    tokenizer = byte_fallback_tokenizer()
    assert "".join(pieces(tokenizer, [258, 259], prompt=[257])) == " world!"
    assert "".join(pieces(tokenizer, [258], prompt=[byte + 1 for byte in "€".encode()])) == " world"


def reference_stop(text: str, stops: list[str]) -> str:
    """Character by character: the first position at which any stop string is complete."""
    for end in range(1, len(text) + 1):
        done = [stop for stop in stops if text[:end].endswith(stop)]
        if done:
            return text[: end - max(map(len, done))]
    return text


@settings(deadline=None)
@given(
    text=st.text("abc", max_size=30),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=4),
    cuts=st.lists(st.integers(0, 30), max_size=8),
)
def test_stop_strings_match_across_any_chunk_split(text: str, stops: list[str], cuts: list[int]) -> None:
    buffer = StopStrings(stops)
    borders = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    out = "".join(buffer.push(text[a:b]) for a, b in itertools.pairwise(borders))
    assert buffer.stopped == any(stop in text for stop in stops)
    if not buffer.stopped:
        out += buffer.flush()
    assert out == reference_stop(text, stops)


class CountingDict(dict[tuple[int, str], int]):
    """A dictionary that counts its lookups."""

    lookups = 0

    def get(self, key: Any, default: Any = None) -> Any:
        """Count the lookup."""
        self.lookups += 1
        return super().get(key, default)


@pytest.mark.parametrize("stops", [["a" * 3000 + "b"], ["a" * size + "b" for size in range(1, 80)]])
def test_search_for_stop_strings_takes_linear_time_in_the_text(stops: list[str]) -> None:
    """Text that nearly completes a stop string again and again costs at most two lookups per character."""
    buffer = StopStrings(stops)
    machine = StopAutomaton(stops)
    counting = machine._next = CountingDict(machine._next)
    buffer._automaton = machine
    text = ("a" * 2999 + "c") * 10
    shown = "".join(buffer.push(text[at : at + 4]) for at in range(0, len(text), 4)) + buffer.flush()
    assert shown == text
    assert counting.lookups <= 2 * len(text) + 2


def test_text_that_is_no_beginning_of_a_stop_string_is_emitted_immediately() -> None:
    buffer = StopStrings(["END"])
    assert buffer.push("hello") == "hello"
    assert buffer.push(" E") == " "
    assert buffer.push("N") == ""
    assert buffer.push("X") == "ENX"


def test_eos_ids_come_from_generation_config_or_else_from_config(tmp_path, tokenizer_folder) -> None:
    source = (tokenizer_folder / "tokenizer.json").read_bytes()
    (tmp_path / "tokenizer.json").write_bytes(source)
    assert Tokenizer.from_folder(tmp_path).eos_token_ids == ()
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"eos_token_id": 7}}))
    assert Tokenizer.from_folder(tmp_path).eos_token_ids == (7,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    assert Tokenizer.from_folder(tmp_path).eos_token_ids == (2, 0)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": "two"}))
    with pytest.raises(ConfigError, match="eos_token_id"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)


def test_tokenizer_module_imports_no_torch_transformers_or_numpy() -> None:
    code = (
        "import sys, tonnage.server.text.tokenizer; "
        "print({'torch', 'transformers', 'numpy'} & set(sys.modules))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"


def test_truncation_and_padding_stored_in_tokenizer_json_are_disabled(tokenizer_folder, tmp_path) -> None:
    """Files of sentence-transformers say how their training batches were made."""
    document = json.loads((tokenizer_folder / "tokenizer.json").read_text())
    document["truncation"] = {"max_length": 8, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    document["padding"] = {
        "strategy": {"Fixed": 16}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
        "pad_type_id": 0, "pad_token": "<|endoftext|>",
    }  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    (tmp_path / "config.json").write_text((tokenizer_folder / "config.json").read_text())
    saved, plain = Tokenizer.from_folder(tmp_path), Tokenizer.from_folder(tokenizer_folder)
    for text in ("fox", "one two three four five six seven eight nine ten eleven"):
        assert saved.encode(text) == plain.encode(text)


def test_text_offsets_of_logprobs_skip_special_tokens_that_the_text_omits(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<|im_start|>user\nHi<|im_end|>\n", add_special_tokens=False)
    tokens = [None, *(TokenLogprobs(token, -1.0, ()) for token in ids[1:])]
    for echo, shows in ((tokenizer.decode(ids), False), (tokenizer.decode_all(ids), True)):
        lists = CompletionLogprobs(tokenizer, 0, echo, special_tokens=shows).take(tokens, ids)
        for text, offset, token in zip(lists["tokens"], lists["text_offset"], ids, strict=True):
            if shows or not tokenizer.is_special(token):
                assert echo[offset : offset + len(text)] == text
        assert all(0 <= offset <= len(echo) for offset in lists["text_offset"])
    # A prompt of text in which a special token is written out: the echo is that text.
    written = CompletionLogprobs(tokenizer, 0, tokenizer.decode_all(ids)).take(tokens, ids)
    assert written["text_offset"] == lists["text_offset"]
