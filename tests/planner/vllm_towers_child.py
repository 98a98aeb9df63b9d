"""Print the peak bytes of vLLM's own vision towers while they encode on a CPU; one JSON line per tower.

Storages are counted at allocation and release. Attention and rotary embeddings, whose kernels a CPU lacks, are
replaced by functions that return their outputs. It needs torchvision.
"""

import json
import sys
import tempfile
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

SIDE = 64  # patches per side of an image


class Live(TorchDispatchMode):
    """A dispatch mode that counts the storages operations allocate: ``peak`` and ``live`` bytes."""

    def __init__(self, known: tuple[torch.Tensor, ...]) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._seen = {tensor.untyped_storage()._cdata for tensor in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_flatten(out)[0]:
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return out

    def _count(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._seen:
            return
        self._seen.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)

        def gone() -> None:
            self._seen.discard(key)
            self.live -= size

        weakref.finalize(storage, gone)


def towers(hidden: int, inner: int) -> dict[str, tuple[torch.nn.Module, Callable[[Any], Any], int]]:
    """Return for each tower (module, call, number of patches)."""
    from transformers import (
        AutoModel,
        CLIPVisionConfig,
        Gemma4VisionConfig,
        Llama4VisionConfig,
        PixtralVisionConfig,
        SiglipVisionConfig,
    )
    from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
    from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
    from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
    from vllm.model_executor.models.clip import CLIPVisionModel
    from vllm.model_executor.models.mllama4 import Llama4VisionModel
    from vllm.model_executor.models.moonvit import MoonVitPretrainedModel
    from vllm.model_executor.models.pixtral import PixtralHFVisionModel
    from vllm.model_executor.models.qwen2_5_vl import Qwen2_5_VisionTransformer
    from vllm.model_executor.models.qwen2_vl import Qwen2VisionTransformer
    from vllm.model_executor.models.qwen3_vl import Qwen3_VisionTransformer
    from vllm.model_executor.models.siglip import SiglipVisionModel
    from vllm.models.minimax_m3.common.vision_tower import MiniMaxVLVisionTransformer
    from vllm.transformers_utils.configs.moonvit import MoonViTConfig

    one, grid = SIDE * SIDE, [[1, SIDE, SIDE]]
    qwen = {"depth": 3, "num_heads": 4}
    plain = {
        "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": 3, "num_attention_heads": 4,
    }  # fmt: skip
    square = {**plain, "image_size": 14 * SIDE, "patch_size": 14}
    picture, flat = torch.zeros(2, 3, 14 * SIDE, 14 * SIDE), torch.zeros(one, 3 * 2 * 14 * 14)
    wide, cut = torch.zeros(one, 3 * 2 * 16 * 16), torch.zeros(one, 3, 14, 14)
    qwen2 = Qwen2VLVisionConfig(embed_dim=hidden, mlp_ratio=inner // hidden, hidden_size=16, **qwen)
    qwen25 = Qwen2_5_VLVisionConfig(
        hidden_size=hidden, intermediate_size=inner, out_hidden_size=16, fullatt_block_indexes=[1], **qwen
    )
    qwen3 = Qwen3VLVisionConfig(
        hidden_size=hidden, intermediate_size=inner, out_hidden_size=16, deepstack_visual_indexes=[],
        num_position_embeddings=2304, **qwen,
    )  # fmt: skip
    llama4 = Llama4VisionModel(Llama4VisionConfig(**square, projector_input_dim=16, projector_output_dim=16))
    llama4.vision_adapter = torch.nn.Identity()  # its widths follow from a width of the tower
    three = Config(
        **plain, num_channels=3, patch_size=14, layer_norm_eps=1e-5, img_token_compression_config={}
    )  # fmt: skip
    gemma4 = AutoModel.from_config(
        Gemma4VisionConfig(**plain, num_key_value_heads=4, head_dim=hidden // 4, position_embedding_size=128)
    )
    places = torch.stack(torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij"), -1).view(
        1, one, 2
    )
    pixels = torch.zeros(1, one, 3 * 16 * 16)
    return {
        "llama4": (llama4, lambda m: m(picture), 2 * (one + 1)),
        "minimax": (MiniMaxVLVisionTransformer(three), lambda m: m(flat, grid), one),
        "gemma4": (gemma4, lambda m: _gemma4(m, pixels, places), one),
        "qwen2": (Qwen2VisionTransformer(qwen2), lambda m: m(flat, grid), one),
        "qwen2_5": (Qwen2_5_VisionTransformer(qwen25), lambda m: m(flat, grid), one),
        "qwen3": (Qwen3_VisionTransformer(qwen3), lambda m: m(wide, grid), one),
        "siglip": (
            SiglipVisionModel(SiglipVisionConfig(**square, vision_use_head=False)), lambda m: m(picture),
            2 * one,
        ),
        "clip": (
            CLIPVisionModel(CLIPVisionConfig(**square), num_hidden_layers_override=2, require_post_norm=False),
            lambda m: m(picture, feature_select_strategy="default"), 2 * (one + 1),
        ),
        "pixtral": (PixtralHFVisionModel(PixtralVisionConfig(**square)), lambda m: m(list(picture)), 2 * one),
        "moonvit": (
            MoonVitPretrainedModel(MoonViTConfig(**plain)), lambda m: m(cut, torch.tensor([[SIDE, SIDE]])), one,
        ),
    }  # fmt: skip


class Config:
    """A stand-in for a config of the engine."""

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)


def _gemma4(model: Any, pixels: torch.Tensor, places: torch.Tensor) -> Any:
    """Call the tower as models/gemma4_mm.py does."""
    padding = (places == -1).all(dim=-1)
    made = model.patch_embedder(pixels, places, padding)
    return model.encoder(inputs_embeds=made, attention_mask=~padding, pixel_position_ids=places)


def _replace_kernels() -> None:
    """Replace the kernels that transformers and MiniMax-M3's tower call by their outputs."""
    from vllm.models.minimax_m3.common import vision_tower

    def tables(t: Any, h: Any, w: Any, grid: Any, merge: int) -> Any:
        shape = 3, sum(a * b * c for a, b, c in grid), 3 * t.numel()
        return torch.empty(shape, dtype=torch.float32), torch.empty(shape, dtype=torch.float32)

    vision_tower.vit_mrope_setup = tables
    vision_tower.triton_mrope = lambda *_, **__: None
    torch.nn.functional.scaled_dot_product_attention = lambda query, *_, **__: torch.empty_like(query)


def main(folder: str, sizes: list[list[int]]) -> None:
    """Print the peak of each tower; ``folder`` is any model that vLLM has, for a configuration."""
    import vllm.model_executor.layers.linear as linear
    from vllm.config import MultiModalConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers.attention.mm_encoder_attention import MMEncoderAttention
    from vllm.model_executor.layers.rotary_embedding.common import ApplyRotaryEmb

    def attention(self: Any, query: Any, key: Any, value: Any, **rest: Any) -> Any:
        return torch.empty_like(query, memory_format=torch.contiguous_format)

    MMEncoderAttention.__call__ = attention
    _replace_kernels()
    ApplyRotaryEmb.__call__ = lambda self, x, cos, sin: torch.empty_like(x)
    linear.dispatch_unquantized_gemm = lambda *_: lambda layer, *a: torch.nn.functional.linear(*a)
    config = EngineArgs(model=folder, dtype="bfloat16", max_model_len=64).create_engine_config()
    config.model_config.multimodal_config = MultiModalConfig()
    torch.set_default_dtype(torch.bfloat16)
    with set_current_vllm_config(config), torch.inference_mode():
        init_distributed_environment(1, 0, f"file://{tempfile.mktemp()}", 0, "gloo")
        initialize_model_parallel(1, 1)
        for hidden, inner in sizes:
            for name, (tower, run, patches) in towers(hidden, inner).items():
                model = tower.to(torch.bfloat16)
                run(model)  # warm up the buffers that are allocated once and kept
                own = (*model.parameters(), *model.buffers())
                with Live(own) as count:
                    run(model)
                answer = {
                    "tower": name,
                    "hidden": hidden,
                    "inner": inner,
                    "patches": patches,
                    "peak": count.peak,
                }
                print("RESULT " + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
