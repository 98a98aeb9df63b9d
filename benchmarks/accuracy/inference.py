"""``inference``: peak memory of a plain transformers forward pass, against published measurements."""

from __future__ import annotations

import re

from accuracy.common import Inputs, Section, read_tsv

NAME = "inference"


def score(inputs: Inputs) -> Section | None:
    if inputs.configs is None or inputs.receipts is None:
        return None
    from tonnage.planner.errors import TonnageError
    from tonnage.planner.families.registry import build_architecture
    from tonnage.planner.plan import Deployment
    from tonnage.planner.quantization import read_quantization
    from tonnage.planner.runtime.forward import forward_peak
    from tonnage.planner.weights import sum_weights

    section = Section()
    left_out = []
    within = 0
    names = inputs.names()
    for row in read_tsv(inputs.receipts, "model", "engine", "quantity", "value"):
        shape = re.search(r"(bf16|fp16|fp32) b=(\d+) s=(\d+) (sdpa|eager)\s*$", row["quantity"])
        if "(inference)" not in row["engine"] or shape is None:
            continue
        label = f"{row['model']} {row['quantity']}"
        found = [name for name in names if name.partition("__")[2].removeprefix("Meta-") == row["model"]]
        if not found:
            left_out.append(f"{label}: no config")
            continue
        config = inputs.config(found[0])
        assert config is not None
        dtype = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[shape[1]]
        try:
            architecture = build_architecture(config)
            weights = sum_weights(architecture, read_quantization(config, None), Deployment(dtype=dtype)).total
            beside = forward_peak(architecture, int(shape[2]), int(shape[3]), dtype, eager=shape[4] == "eager")
        except TonnageError as error:
            section.refuse(label, error)
            continue
        planned, printed = (weights + beside) / 1e9, float(row["value"])
        section.rows += 1
        section.errors.append(abs(planned - printed) / printed)
        section.exact += round(planned, 2) == printed
        within += section.errors[-1] <= 0.01
        if round(planned, 2) != printed:
            section.misses.append(f"{label}: planned {planned:.3f} GB, measured {printed} GB")
    section.extra |= {"within_1_percent": within, "left_out": left_out}
    return section
