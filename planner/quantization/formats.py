"""How one linear weight [out, in] is stored under each format: the storages and their bytes, and what changes
between the file, the load and the first forward.

A matrix is described by its storages (``parts``), bytes by name. ``extra_in_file`` is what only the checkpoint
holds; ``after_warmup`` what a kernel makes of the storages, where one repacks them.
"""

from __future__ import annotations

from typing import Literal

from tonnage.planner.errors import UnsupportedArchitecture
from tonnage.planner.records import dataclass
from tonnage.planner.units import ceil_div

Kind = Literal[
    "int8", "nf4", "gptq", "awq", "fp8", "int-w8", "packed", "mxfp4", "mxfp8", "nvfp4", "hqq", "torchao-int4",
    "torchao-int8",
]  # fmt: skip

# bitsandbytes 0.50, functional.py
NF4_BLOCK = 64  # values per absmax (FP4 alike)
NF4_CODE_BYTES = 16 * 4  # 16 levels, fp32
NESTED_BLOCK = 256  # absmax values per nested absmax
NESTED_CODE_BYTES = 256 * 4  # dynamic map, fp32
NESTED_OFFSET_BYTES = 4  # mean of the absmax values, fp32
INT8_ROW_BYTES = 4  # SCB: one fp32 absmax per output row

MX_BLOCK = 32  # values per shared 8-bit exponent (OCP Microscaling Formats 1.0, section 5.2)
NVFP4_BLOCK = 16  # values per fp8 scale (ModelOpt 0.33, torch/quantization/qtensor/nvfp4_tensor.py)


@dataclass(frozen=True, slots=True)
class LinearFormat:
    """Format of one linear layer. ``block``: (rows, columns) that share a scale, 0 for the whole side, None:
    one scale for the matrix. ``scale_bytes``: of one scale. ``input_scale``: a static activation scale (fp32)
    is stored too. ``double``: the absmax of NF4 is quantized again."""

    kind: Kind
    bits: int = 4
    group_size: int = 128
    double: bool = False
    block: tuple[int, int] | None = None
    scale_bytes: int = 4
    zero_points: bool = True
    act_order: bool = False
    input_scale: bool = False
    code: str = "nf4"  # nf4 | fp4

    def parts(self, out: int, into: int, where: str = "") -> dict[str, int]:
        """Storages after load, in bytes by name."""
        n = out * into
        if self.kind == "int8":
            return {"weight": n, "SCB": INT8_ROW_BYTES * out}
        if self.kind == "nf4":
            return self._nf4(n)
        if self.kind in ("gptq", "awq"):
            return self._int32_words(out, into, where)
        if self.kind in ("fp8", "int-w8", "mxfp8"):
            return self._bytes_and_scales(out, into)
        if self.kind == "packed":
            return self._packed(out, into)
        if self.kind == "mxfp4":
            return {"blocks": ceil_div(n, 2), "scales": out * ceil_div(into, MX_BLOCK)}
        if self.kind == "nvfp4":
            scales = {"weight": out * ceil_div(into, 2), "weight_scale": out * ceil_div(into, NVFP4_BLOCK)}
            return {**scales, "weight_scale_2": 4, **({"input_scale": 4} if self.input_scale else {})}
        if self.kind == "hqq":  # W_q, one fp16 scale and zero per group (hqq 0.2, core/quantize.py)
            groups = ceil_div(n, self.group_size)
            return {"W_q": ceil_div(n * self.bits, 8), "scale": 2 * groups, "zero": 2 * groups}
        if self.kind == "torchao-int4":  # packed values, bf16 scale and zero per group (torchao 0.14, int4_wo)
            return {"packed_weight": n // 2, "scale_and_zero": 4 * out * ceil_div(into, self.group_size)}
        return {"int_data": n, "scale": self.scale_bytes * out}  # torchao int8_wo: a scale per row

    def extra_in_file(self, out: int, into: int) -> int:
        """Bytes of the file that are not loaded (a negative sum: less in the file).

        bitsandbytes stores a format byte with int8, and NF4's offset inside a JSON text instead of a
        tensor; the text itself (about 172 bytes) depends on printed digits and is left out.
        """
        if self.kind == "int8":
            return 1
        if self.kind == "nf4" and self.double:
            return -NESTED_OFFSET_BYTES
        return 0

    def after_warmup(self, out: int, into: int, kernel: str | None, where: str = "") -> dict[str, int]:
        """Storages once the kernel has run; ``kernel`` None: nothing is repacked.

        ``bitsandbytes-cpu-avx512``: absmax becomes bf16, nested absmax is unpacked and its code book freed
        (bitsandbytes 0.50.2, backends/cpu; measured by tests/planner/test_quantization_real.py).
        ``gptqmodel-cpu-avx512``: scales become fp32, zeros are unpacked to bytes, and the order of the inputs
        is kept beside their groups (gptqmodel 7.7, nn_modules/qlinear/torch_cpu_avx512.py; measured by
        tests/gptq/test_gptq_real.py); of AWQ scales and zeros alike (torch_cpu_avx512_awq.py; measured by
        tests/gptq/test_gptq_served.py). ``vllm-cpu-wna16``: nothing more than at the load (:meth:`loaded_by`).
        """
        if kernel == "vllm-cpu-wna16":
            return self.loaded_by(kernel, out, into, where)
        parts = self.parts(out, into, where)
        groups = parts["scales"] // (2 * out) if self.kind in ("gptq", "awq") else 0
        if kernel == "gptqmodel-cpu-avx512" and self.kind == "awq":
            return {**parts, "scales": 4 * groups * out, "qzeros": groups * out}
        if kernel == "gptqmodel-cpu-avx512" and self.kind == "gptq":
            return {
                **parts,
                "scales": 4 * groups * out,
                "qzeros": groups * out,
                "ret_idx": 4 * into,
                "wf_unsqueeze": self.shifts_bytes(),
            }
        if kernel == "bitsandbytes-cpu-avx512" and self.kind == "nf4":
            kept = {"weight": parts["weight"], "code": parts["code"]}
            kept["absmax"] = 2 * ceil_div(out * into, NF4_BLOCK)
            if self.double:
                kept["offset"] = NESTED_OFFSET_BYTES
            return kept
        return parts

    def loaded_by(self, kernel: str | None, out: int, into: int, where: str = "") -> dict[str, int]:
        """Storages once an engine has loaded the weight, where its kernel changes GPTQ's.

        ``gptqmodel-cpu-avx512``: GPTQModel's kernels keep in each module the shifts that unpack a 32-bit word,
        int32 (gptqmodel 7.7, nn_modules/qlinear/__init__.py, wf_unsqueeze_zero). ``vllm-cpu-wna16``: vLLM's
        kernel for 4 bits wants neither zero points, which are all the same, nor group indices (0.32.0,
        auto_gptq.py and kernels/linear/mixed_precision/cpu.py; measured by tests/server/test_both_engines.py).
        """
        parts = self.parts(out, into, where)
        if self.kind == "gptq" and kernel == "gptqmodel-cpu-avx512":
            return {**parts, "wf_unsqueeze": self.shifts_bytes()}
        if self.kind == "gptq" and kernel == "vllm-cpu-wna16":
            return {name: parts[name] for name in ("qweight", "scales")}
        return parts

    def shifts_bytes(self) -> int:
        return 4 * (36 if self.bits == 3 else 32 // self.bits)

    def _nf4(self, n: int) -> dict[str, int]:
        blocks = ceil_div(n, NF4_BLOCK)
        packed = {"weight": ceil_div(n, 2), "code": NF4_CODE_BYTES}
        if not self.double:
            return {**packed, "absmax": 4 * blocks}
        return {
            **packed,
            "absmax": blocks,
            "nested_absmax": 4 * ceil_div(blocks, NESTED_BLOCK),
            "nested_code": NESTED_CODE_BYTES,
            "offset": NESTED_OFFSET_BYTES,
        }

    def _int32_words(self, out: int, into: int, where: str) -> dict[str, int]:
        """GPTQ packs along the inputs and stores the group of each input, with and without act-order; AWQ
        packs along the outputs and has no index."""
        gptq = self.kind == "gptq"
        sides = ((into, "in_features"), (out, "out_features")) if gptq else ((out, "out_features"),)
        for size, side in sides:
            if size * self.bits % 32:
                raise UnsupportedArchitecture(
                    f"{where}: {side} {size} x {self.bits} bits do not fill 32-bit words",
                    field="quantization_config.bits",
                )
        groups = 1 if self.group_size == -1 else ceil_div(into, self.group_size)
        parts = {
            "qweight": into * out * self.bits // 8,
            "qzeros": groups * (out * self.bits // 32) * 4,
            "scales": groups * out * 2,
        }
        return {**parts, "g_idx": into * 4} if gptq else parts

    def _bytes_and_scales(self, out: int, into: int) -> dict[str, int]:
        """One byte per value; a scale per matrix, row, group or block. MXFP8: an 8-bit exponent per 32."""
        if self.kind == "mxfp8":
            return {"weight": out * into, "weight_scale": out * ceil_div(into, MX_BLOCK)}
        if self.block is None:
            scales = 1
        else:
            rows, columns = (side or size for side, size in zip(self.block, (out, into), strict=True))
            scales = ceil_div(out, rows) * ceil_div(into, columns)
        parts = {"weight": out * into, "weight_scale": scales * self.scale_bytes}
        return {**parts, "input_scale": 4} if self.input_scale else parts

    def _packed(self, out: int, into: int) -> dict[str, int]:
        """compressed-tensors' pack-quantized: int32 words along the inputs, a scale per group (in the
        model's dtype), the shape as two int64 (compressors/quantized_compressors/pack_quantized.py, 0.12)."""
        groups = 1 if self.group_size == -1 else ceil_div(into, self.group_size)
        per_word = 32 // self.bits
        parts = {
            "weight_packed": out * ceil_div(into, per_word) * 4,
            "weight_scale": out * groups * self.scale_bytes,
            "weight_shape": 16,
        }
        if self.zero_points:
            parts["weight_zero_point"] = ceil_div(out, per_word) * groups * 4
        if self.act_order:
            parts["weight_g_idx"] = into * 4
        return parts
