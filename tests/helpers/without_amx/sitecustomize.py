"""Let torch and vLLM see a CPU without AMX in every Python process that has this folder on its path.

With AMX vLLM takes other block sizes for latent attention, other layouts of GPTQ weights, and matrix products
whose last bits depend on the batch: the answers that tests compare with are of a CPU without it. oneDNN reads
ONEDNN_MAX_CPU_ISA (tests/conftest.py); vLLM 0.32 asks torch.cpu.
"""

import importlib.util
import sys
from importlib.machinery import PathFinder


class _WithoutAmx:
    """Finds torch.cpu, and takes AMX out of it once it is loaded."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name != "torch.cpu":
            return None
        spec = PathFinder.find_spec(name, path, target)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            module._is_amx_tile_supported = module._is_amx_fp16_supported = lambda: False

        spec.loader.exec_module = exec_module
        return spec


if "torch.cpu" in sys.modules:
    sys.modules["torch.cpu"]._is_amx_tile_supported = lambda: False
elif importlib.util.find_spec("torch") is not None:
    sys.meta_path.insert(0, _WithoutAmx())
