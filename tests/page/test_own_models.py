"""Tests of a user's own models on the page: pasted, dropped and linked."""

from __future__ import annotations

import json
import struct
from math import prod
from pathlib import Path
from typing import Any

from browsing import Sight, commanded

from tonnage.planner.families.registry import build_architecture
from tonnage.planner.page.build import model_files

INDEX = "model.safetensors.index.json"
CONFIG = model_files()["Qwen/Qwen3-4B/config.json"]
SPECS = [one for one in build_architecture(json.loads(CONFIG)).tensors if one.is_parameter and not one.tied_to]
TOTAL = 2 * sum(one.elements for one in SPECS)


def file(name: str, content: bytes) -> dict[str, Any]:
    return {"name": name, "mimeType": "", "buffer": content}


def index(total: int = TOTAL, *more: str) -> dict[str, Any]:
    names = dict.fromkeys([*(one.name for one in SPECS), *more], "model-00001-of-00001.safetensors")
    return file(INDEX, json.dumps({"metadata": {"total_size": total}, "weight_map": names}).encode())


def paste(sight: Sight, text: str) -> None:
    sight.page.fill("#paste", text)
    sight.page.locator("#paste").blur()


def opened(sight: Sight) -> Sight:
    sight.open()
    sight.page.click("summary")
    return sight


def test_pasted_config_is_planned_and_can_be_shared_by_link(sight: Sight, browser: Any, models: Path) -> None:
    opened(sight)
    paste(sight, CONFIG.decode())
    own = sight.planned("own/qwen3-")
    _, *flags = sight.page.evaluate("() => window.tonnage.argv()")
    shipped = json.loads(commanded("plan", ["Qwen/Qwen3-4B", *flags], models)[1])
    assert sight.plan()["kv_cache"] == shipped["kv_cache"]
    sight.page.click("#keep")
    paste(sight, json.dumps(json.loads(CONFIG) | {"num_hidden_layers": 12}))
    other = sight.planned("own/qwen3-")
    assert other != own  # the kept plan still refers to the first config
    sight.settle()
    figures = sight.page.locator("#beside tbody tr >> nth=2").all_inner_texts()
    assert len(set(figures[0].split("\t")[1:])) == 2
    assert len(sight.page.url) < 2500
    elsewhere = Sight(browser.new_page(), "")
    elsewhere.open(sight.page.url)
    elsewhere.settle()
    assert elsewhere.page.evaluate("() => window.tonnage.out") == sight.page.evaluate(
        "() => window.tonnage.out"
    )
    assert elsewhere.page.locator("#beside tbody tr >> nth=2").all_inner_texts() == figures
    elsewhere.page.close()
    for text, words in (('{"model_type": "no_type"}', "no_type"), ("{", "not JSON"), ("[]", "JSON object")):
        paste(sight, text)
        sight.refused(words)
    paste(sight, '{"model_type": "no_type"}')
    sight.refused("no_type")
    sight.page.evaluate("() => scrollTo(0, 0)")
    sight.picture("refused")


def test_checkpoint_index_dropped_on_the_page_is_planned_with_the_config_dropped_beside_it_or_the_shown_one(
    sight: Sight,
) -> None:
    opened(sight)
    sight.page.set_input_files(
        "#file", [file("config.json", CONFIG), file("tokenizer_config.json", b"{}"), index()]
    )
    sight.planned("own/qwen3-")
    plan = sight.plan()
    assert plan["model"]["via"] == "index"
    assert {term["name"]: term["value"] for term in plan["terms"]}["checkpoint_bytes"] == TOTAL
    assert "stay in this browser" in sight.page.inner_text("#result")
    sight.page.select_option("#known", "Qwen/Qwen3-4B")
    sight.planned("Qwen/Qwen3-4B")
    sight.page.set_input_files("#file", index(TOTAL + 10, "model.layers.0.self_attn.rotary_emb.inv_freq"))
    sight.planned("own/qwen3-")
    assert (
        "10 more in the files; of no module planned: layers.0.self_attn.rotary_emb (1)"
        in sight.page.inner_text("#result")
    )
    sight.picture("index")
    sight.page.select_option("#known", "Qwen/Qwen3-8B")
    sight.planned("Qwen/Qwen3-8B")
    sight.page.set_input_files("#file", index())  # the index of a smaller model
    sight.refused("do not belong together")


def test_large_checkpoint_files_dropped_on_the_page_are_planned_from_their_headers(
    sight: Sight, tmp_path: Path, models: Path
) -> None:
    """The files have their stated length but are empty, so that only their headers can be read in time."""
    spans, at = {}, 0
    for one in SPECS:
        spans[one.name] = {
            "dtype": "BF16",
            "shape": one.shape,
            "data_offsets": [at, at := at + 2 * one.elements],
        }
    text = json.dumps(spans).encode()
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(struct.pack("<Q", len(text)) + text)
    with weights.open("r+b") as grown:
        grown.truncate(8 + len(text) + TOTAL)
    (tmp_path / "config.json").write_bytes(CONFIG)
    opened(sight)
    sight.page.set_input_files("#file", [tmp_path / "config.json", weights])
    sight.planned("own/qwen3-")
    assert sight.plan()["model"]["via"] == "headers"
    with weights.open("r+b") as cut:
        cut.truncate(TOTAL)
    sight.page.set_input_files("#file", [tmp_path / "config.json", weights])
    sight.refused("truncated download?")

    path = tmp_path / "seven-b.F16.gguf"
    size = gguf(path)
    assert size > 10 * 2**30
    sight.page.set_input_files("#file", path)
    model = sight.planned("seven-b.F16.gguf")
    (models / model).parent.mkdir(parents=True)
    (models / model).hardlink_to(path)
    asked = sight.page.evaluate("() => window.tonnage.argv()")
    assert sight.page.evaluate("() => window.tonnage.out") == commanded("plan", asked, models)[1]
    sight.page.set_input_files("#file", file("a.gguf", b"GGUF" + bytes(20)))
    sight.refused("a.gguf")


def gguf(path: Path) -> int:
    """Write a Llama of 7 billion parameters without its values, and return its size in bytes.

    The format is ggml/docs/gguf.md, version 3.
    """
    width, inner, layers, heads, kv, vocab = 4096, 14336, 32, 32, 8, 32000

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    fields = [text("general.architecture") + struct.pack("<I", 8) + text("llama")]
    for key, value in {
        "context_length": 4096, "embedding_length": width, "block_count": layers, "feed_forward_length": inner,
        "attention.head_count": heads, "attention.head_count_kv": kv, "rope.dimension_count": width // heads,
    }.items():  # fmt: skip
        fields.append(text(f"llama.{key}") + struct.pack("<II", 4, value))
    fields.append(text("llama.attention.layer_norm_rms_epsilon") + struct.pack("<If", 6, 1e-5))
    tokens = b"".join(text(f"t{number}") for number in range(vocab))
    fields.append(text("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, vocab) + tokens)
    shapes = {"token_embd": [vocab, width], "output_norm": [width], "output": [vocab, width]}
    for layer in range(layers):
        shapes |= {
            f"blk.{layer}.{name}": shape
            for name, shape in {
                "attn_norm": [width], "attn_q": [width, width], "attn_k": [width * kv // heads, width],
                "attn_v": [width * kv // heads, width], "attn_output": [width, width], "ffn_norm": [width],
                "ffn_gate": [inner, width], "ffn_up": [inner, width], "ffn_down": [width, inner],
            }.items()
        }  # fmt: skip
    infos, at = [], 0
    for name, shape in shapes.items():
        sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        infos.append(text(f"{name}.weight") + sizes + struct.pack("<IQ", 1 if len(shape) > 1 else 0, at))
        at += prod(shape) * (2 if len(shape) > 1 else 4)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(infos), len(fields)) + b"".join(fields) + b"".join(infos)
    path.write_bytes(head)
    size = -(-len(head) // 32) * 32 + at
    with path.open("r+b") as grown:
        grown.truncate(size)
    return size


def test_incomplete_checkpoint_files_dropped_on_the_page_are_rejected(sight: Sight) -> None:
    opened(sight)
    sight.page.set_input_files("#file", file("notes.txt", b"hello"))
    sight.refused("None of these")
    sight.page.set_input_files("#file", file("model-00001-of-00004.safetensors", bytes(16)))
    sight.refused("one of several")
    sight.page.set_input_files(
        "#file", [file(f"model-0000{at}-of-00002.safetensors", bytes(16)) for at in (1, 2)]
    )
    sight.refused("need their index")
    sight.page.set_input_files("#file", file("qwen.json", CONFIG))  # saved under a name of its own
    sight.planned("own/qwen3-")
    sight.page.goto("about:blank")
    sight.page.goto(sight.url + "?model=own/gone-1234abcd&gpu=h100-80g&engine=vllm&engine-version=0.33.0")
    sight.refused("Drop the file here")
