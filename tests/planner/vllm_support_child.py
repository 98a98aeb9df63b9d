"""Print what vLLM's own checks allow on which GPU; one JSON line.

Run as a program. The platform here is a CPU that poses as a CUDA device of each capability in turn. The
attention backends are queried as vLLM's CUDA platform queries them, in its order. GPU libraries that they
import are replaced by empty modules, and FlashInfer is assumed to be installed. Triton's implementations check
their arguments when they are created, and are created.
"""

import json
import os
import sys
from importlib.machinery import ModuleSpec
from unittest.mock import MagicMock

CAPABILITIES = ((7, 0), (7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1))
HEADS = (64, 96, 128)
SCHEMES = ("W8A16Fp8", "W8A8Int8", "WNA16", "W4A4Fp4", "W4A4Mxfp4")


def main() -> None:
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    for name in ("", ".decode", ".fp4_quantization", ".prefill", ".utils", ".cute_dsl", ".comm"):
        spec = ModuleSpec(f"flashinfer{name}", None)
        sys.modules.setdefault(f"flashinfer{name}", MagicMock(__spec__=spec, __version__="0.6.0"))
    sys.modules.setdefault("vllm._C_stable_libtorch", MagicMock())
    from vllm.config import VllmConfig, set_current_vllm_config

    with set_current_vllm_config(VllmConfig()):
        out = {"methods": methods(), "schemes": schemes(), "caches": caches()}
    print("RESULT " + json.dumps({"folder": sys.argv[1], **out}), flush=True)


def methods() -> dict:
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, get_quantization_config

    found = {}
    for name in QUANTIZATION_METHODS:
        config = get_quantization_config(name)
        dtypes = config.__new__(config).get_supported_act_dtypes()
        found[name] = [
            config.get_min_capability(),
            sorted(str(dtype).removeprefix("torch.") for dtype in dtypes),
        ]
    return found


def schemes() -> dict:
    from vllm.model_executor.layers.quantization.compressed_tensors import schemes as theirs

    names = [f"CompressedTensors{name}" for name in SCHEMES]
    return {name: getattr(theirs, name).get_min_capability() for name in names}


def caches() -> dict:
    """Return {capability: {"plain-128": [formats that some backend accepts]}}."""
    from typing import get_args

    import torch
    from vllm.config.cache import CacheDType
    from vllm.platforms import current_platform
    from vllm.platforms.cuda import _get_attn_backend_class, _get_backend_priorities
    from vllm.platforms.interface import DeviceCapability, PlatformEnum
    from vllm.v1.attention.backends import flashinfer
    from vllm.v1.attention.selector import AttentionSelectorConfig

    flashinfer.supports_trtllm_attention = lambda **_: True
    platform = type(current_platform)
    platform._enum = PlatformEnum.CUDA
    platform.get_device_name = classmethod(lambda cls, device_id=0: "a GPU")
    found: dict = {}
    for capability in CAPABILITIES:
        here = DeviceCapability(*capability)
        platform.get_device_capability = classmethod(lambda cls, device_id=0, here=here: here)
        dtype = torch.bfloat16 if capability >= (8, 0) else torch.float16
        its = found[".".join(map(str, capability))] = {}
        for latent, head in (*((False, head) for head in HEADS), (True, 576)):
            runs = its["latent" if latent else f"plain-{head}"] = []
            for kv in get_args(CacheDType):
                if kv in ("auto", "float16", "bfloat16") or kv.endswith("_ds_mla"):
                    continue
                asked = AttentionSelectorConfig(
                    head_size=head, dtype=dtype, kv_cache_dtype=kv, block_size=None, use_mla=latent
                )
                order = _get_backend_priorities(
                    use_mla=latent, device_capability=here, num_heads=32, kv_cache_dtype=kv, head_size=head
                )
                chosen = next(
                    filter(None, (taken(_get_attn_backend_class, name, here, asked) for name in order)), None
                )
                if chosen is not None and starts(chosen, kv, head):
                    runs.append(kv)
    return found


def taken(class_of, name, capability, asked):
    """Return the backend if it exists and accepts the arguments, else None.

    CUTLASS_MLA allocates on the GPU when it is imported.
    """
    try:
        backend = class_of(name)
    except (ImportError, OSError, AssertionError):
        return None
    reasons = backend.validate_configuration(device_capability=capability, **asked._asdict())
    return None if reasons else backend


def starts(backend, kv: str, head: int) -> bool:
    """Return whether Triton's implementations, which check their arguments, can be created."""
    if backend.get_name() not in ("TRITON_ATTN", "TRITON_MLA"):
        return True
    made = backend.get_impl_cls()
    if backend.get_name() == "TRITON_MLA":
        from vllm.model_executor.layers.attention import mla_attention

        def common(self, *args, **rest):
            self.kv_cache_dtype = kv

        mla_attention.MLACommonImpl.__init__ = common
    try:
        made(
            num_heads=32, head_size=head, scale=1.0, num_kv_heads=8, alibi_slopes=None, sliding_window=None,
            kv_cache_dtype=kv, logits_soft_cap=None, attn_type="decoder", kv_sharing_target_layer_name=None,
        )  # fmt: skip
    except ValueError:
        return False
    return True


if __name__ == "__main__":
    main()
