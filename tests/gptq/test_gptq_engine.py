"""The Hugging Face engine on GPTQ and AWQ checkpoints made by GPTQModel.

The tests compare its tokens with ``generate`` on the same checkpoint, and its bytes with the plan. They use the
first two layers of the demo model, so that quantization takes seconds.

Run by ``make test-gptq`` alone; the reason is in ``test_gptq_real``.
"""

from __future__ import annotations

import os
from multiprocessing import Pipe
from pathlib import Path

import pytest

os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "3")  # one per layer of a block; the default is one per core
gptqmodel = pytest.importorskip("gptqmodel", reason="its own environment: make test-gptq")
torch = pytest.importorskip("torch")

from transformers import AutoModelForCausalLM, GenerationConfig  # noqa: E402

from tonnage.planner.deployment import Deployment  # noqa: E402
from tonnage.planner.planning.build import make_plan  # noqa: E402
from tonnage.server.demo.model import ensure_demo  # noqa: E402
from tonnage.server.engines.hf.child import EngineLoop  # noqa: E402
from tonnage.server.engines.request import GenerationRequest, SamplingParams  # noqa: E402

pytestmark = pytest.mark.timeout(3000)

GROUP_SIZE = 64
TOKENS = 12
TIE = 2**-6  # bfloat16 keeps 8 bits: two roundings
PROMPTS = [list(range(300, 340)), [77] * 9, list(range(1000, 1150)), [5]]


@pytest.fixture(scope="module", params=["gptq", "awq"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from gptqmodel import GPTQModel, QuantizeConfig
    from transformers import AutoTokenizer

    parent = tmp_path_factory.mktemp(request.param)
    os.chdir(parent)  # GPTQModel writes its logs where it stands
    two = AutoModelForCausalLM.from_pretrained(ensure_demo(), dtype=torch.bfloat16, num_hidden_layers=2)
    two.save_pretrained(parent / "two")
    AutoTokenizer.from_pretrained(ensure_demo()).save_pretrained(parent / "two")
    settings = QuantizeConfig(
        bits=4, group_size=GROUP_SIZE, quant_method=request.param, format=request.param.replace("awq", "gemm")
    )
    model = GPTQModel.load(str(parent / "two"), settings)
    model.quantize(["Language models hold weights, activations and a cache of keys and values. " * 6] * 4)
    model.save(str(parent / "model"))
    return parent / "model"


def test_hf_engine_generates_the_tokens_of_transformers_for_a_gptq_model_within_the_planned_bytes(
    folder: Path,
) -> None:
    plan = make_plan(
        str(folder),
        Deployment(
            dtype="bfloat16",
            kv_cache_memory_bytes=8 << 20,
            max_model_len=512,
            max_num_seqs=4,
            max_num_batched_tokens=64,
        ),
    )
    ours, theirs = Pipe()
    with ours, theirs:
        loop = EngineLoop(plan, theirs, torch.get_num_threads())
        assert loop.runner.weights_bytes == plan.rank.weights_bytes
        params = SamplingParams(max_tokens=TOKENS, temperature=0.0, logprobs=1)
        for number, prompt in enumerate(PROMPTS):
            assert not loop.add(GenerationRequest(str(number), tuple(prompt), params))
        chunks = []
        while not loop.scheduler.idle:
            chunks += loop.step()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, device_map="cpu")
    model.generation_config = GenerationConfig(max_new_tokens=TOKENS, pad_token_id=0)  # no EOS
    same = 0
    for number, prompt in enumerate(PROMPTS):
        mine = [chunk for chunk in chunks if chunk.request_id == str(number)]
        assert [chunk.error for chunk in mine if chunk.error] == []
        said = [token for chunk in mine for token in chunk.token_ids]
        assert len(said) == TOKENS
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, output_logits=True,
            return_dict_in_generate=True,
        )  # fmt: skip
        for token, wanted, logits in zip(
            said, out.sequences[0, len(prompt) :].tolist(), out.logits, strict=True
        ):
            if token != wanted:  # two that rounding makes equal; what follows is another text
                assert float(logits[0, wanted] - logits[0, token]) <= TIE * float(logits[0, wanted].abs())
                break
            same += 1
    assert same >= 0.75 * TOKENS * len(PROMPTS)
