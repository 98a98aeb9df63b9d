"""Tests of a checkpoint index without its files: tensors and bytes against config.json."""

from __future__ import annotations

import json

import pytest

from tonnage.planner.deployment import Deployment
from tonnage.planner.errors import CheckpointError
from tonnage.planner.planning.build import make_plan

PHI = "YouriLalain/PRYMMAL-PHI3-3B-SLERP"
# Total size of the published index (tests/data/configs/checkpoint_sizes.tsv): 195 tensors in two files
TOTAL = 7_642_159_104
LAYER = ("input_layernorm", "mlp.down_proj", "mlp.gate_up_proj", "post_attention_layernorm", "self_attn.o_proj",
         "self_attn.qkv_proj")  # fmt: skip
NAMES = ["lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"]
NAMES += [f"model.layers.{layer}.{name}.weight" for layer in range(32) for name in LAYER]
H100 = Deployment(engine="vllm", engine_version="0.33.0", gpu="h100-80g", device="cuda")


@pytest.fixture
def folder(tmp_path, config_of):
    (tmp_path / "config.json").write_text(json.dumps(config_of(PHI)))

    def write(total=TOTAL, names=NAMES, **config):
        files = {name: f"model-{1 + (at > 166):05}-of-00002.safetensors" for at, name in enumerate(names)}
        index = {"metadata": {"total_size": total}, "weight_map": files}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        if config:
            (tmp_path / "config.json").write_text(json.dumps(config_of(PHI) | config))
        return tmp_path

    return write


def planned(folder):
    found = make_plan(str(folder), H100)
    return found, {term.name: term for term in found.terms}, [note for note in found.notes if "index" in note]


def test_tensors_in_published_checkpoint_indexes_equal_those_planned_from_the_config(folder):
    found, terms, notes = planned(folder())
    assert (found.model.via, len(NAMES)) == ("index", 195)
    assert terms["checkpoint_bytes"].value == TOTAL
    assert "195 tensors in 2 files" in terms["checkpoint_bytes"].formula
    assert not notes
    assert make_plan(str(folder() / "model.safetensors.index.json"), H100).model.via == "index"


def test_unused_tensors_in_a_checkpoint_index_add_a_note_and_no_weight_bytes(folder):
    inverse = [f"model.layers.{layer}.self_attn.rotary_emb.inv_freq" for layer in range(32)]
    drafts = ["model.layers.32.eh_proj.weight", "model.layers.32.enorm.weight"]
    (alone := folder() / "model.safetensors.index.json").unlink()
    weights = planned(alone.parent)[0].ranks[0].weights_bytes
    found, terms, notes = planned(folder(TOTAL + 6144, NAMES + inverse + drafts))
    assert found.ranks[0].weights_bytes == weights
    assert "checkpoint_bytes" not in terms
    assert len(notes) == 1
    assert "7,642,165,248 bytes of tensors, config.json gives 7,642,159,104 in bfloat16: 6,144 more" in notes[0]
    assert "of no module planned: layers.*.self_attn.rotary_emb (32), layers.32 (2)" in notes[0]
    _, _, notes = planned(folder(TOTAL - 2))
    assert notes[0].endswith(": 2 less in the files")
    assert "no total_size" in planned(folder(None))[2][0]


def test_planned_page_cache_bytes_follow_the_total_size_in_the_checkpoint_index(folder):
    cached = {planned(folder(total))[0].host.page_cache_bytes for total in (TOTAL, TOTAL + 6144)}
    assert max(cached) - min(cached) == 6144


def test_checkpoint_index_with_a_copy_of_the_tied_lm_head_widens_the_interval_of_weight_bytes(folder):
    """The stored head's values may differ from the embedding's, so that it may be loaded separately."""
    head = 32_064 * 3072 * 2
    found, terms, notes = planned(folder(tie_word_embeddings=True))
    assert (terms["checkpoint_bytes"].value, notes) == (TOTAL, [])
    low, high = found.intervals["weights_bytes"]
    assert high - low >= head
    found, terms, notes = planned(folder(TOTAL - head, NAMES[1:], tie_word_embeddings=True))
    assert (terms["checkpoint_bytes"].value, notes) == (TOTAL - head, [])


@pytest.mark.parametrize(
    ("names", "config", "match"),
    [
        (
            [name for name in NAMES if "layers.31" not in name],
            {},
            r"model\.layers\.31\..* is not in the checkpoint",
        ),
        (NAMES[1:], {}, "lm_head.weight is not in the checkpoint"),
        (NAMES, {"num_hidden_layers": 33}, r"model\.layers\.32\."),
    ],
)
def test_checkpoint_index_that_does_not_match_the_config_is_rejected(folder, names, config, match):
    with pytest.raises(CheckpointError, match=match):
        planned(folder(TOTAL, names, **config))


def test_checkpoint_index_that_lacks_a_shard_is_rejected(folder):
    path = folder()
    (path / "model-00001-of-00002.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors is missing"):
        planned(path)
