"""Write docs/accuracy.md: planned and printed KV pool of every public start-up log in the repository.

    python benchmarks/accuracy_page.py            writes docs/accuracy.md
    python benchmarks/accuracy_page.py --check    exits with 1 if the page is out of date

The shipped planner is scored, as in ``planner_accuracy.py`` (sections startups, published and pool_from_flags,
``shipped``).
That benchmark also leaves each source, model and GPU out of the fit.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import mean, median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from accuracy.startups import Start

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
PAGE = ROOT / "docs" / "accuracy.md"
PLOT = ROOT / "docs" / "accuracy.svg"
MISS = 0.015  # share of the GPU from which an error counts as a miss, as in pool_from_flags
DATA = ROOT / "tests" / "data"


@dataclass(frozen=True)
class StartRow:
    """One start, with bytes of the deciding rank's KV pool and of one GPU (``device``).

    ``kind`` is the catalogue's name of the GPU, and ``fitted`` whether coefficients may be fitted to the start.
    """

    name: str
    source: str
    planned: int
    printed: int
    low: int
    high: int
    device: int
    kind: str
    fitted: bool = True

    @property
    def error(self) -> float:
        """Return the error as a share of the GPU's memory."""
        return (self.planned - self.printed) / self.device


def named(start: Start) -> str:
    """Return the name of a start: vLLM's version, the model, and the flags that distinguish it."""
    flags = start.flags
    said = {
        "tp": flags.tensor_parallel_size if flags.tensor_parallel_size > 1 else None,
        "pp": flags.pipeline_parallel_size if flags.pipeline_parallel_size > 1 else None,
        "dtype": flags.dtype if flags.dtype != "auto" else None,
        "quantization": flags.quantization,
        "kv-cache-dtype": flags.kv_cache_dtype if flags.kv_cache_dtype != "auto" else None,
        "max-model-len": flags.max_model_len,
    }
    words = " ".join(f"{name} {value}" for name, value in said.items() if value is not None)
    return f"vLLM {flags.engine_version} {start.found.id}, {words}"


def reported(words: str) -> str:
    """Return the label of a report without a leading ``#``, which Markdown reads as a heading."""
    return re.sub(r"^#(\d+) (.*)$", r"\2, report \1", words.replace("vLLM None", "vLLM"))


def lines() -> tuple[list[StartRow], list[str]]:
    """Return (every start that can be compared with a plan, the others with the reason)."""
    from accuracy import published, runtime_fit, startups
    from accuracy.common import Inputs

    from tonnage.planner.engines.runtime.gpu import coefficients

    found = []
    starts, left_out = startups.load(
        Inputs(configs=DATA / "startups", startups=DATA / "startups/vllm_0190.jsonl")
    )
    for start in starts:
        plan = startups.planned(start)
        low, high = plan.intervals["kv_pool_bytes"]
        pool = plan.rank.kv_pool_bytes
        printed = start.logged["kv_pool_bytes"]
        found.append(
            StartRow(
                named(start), f"github.com/{startups.SWEEP}", pool, printed, int(low), int(high),
                plan.rank.total_bytes, start.flags.gpu or "not named",
            )
        )  # fmt: skip
    rows, others = runtime_fit.load_rows(Inputs(configs=DATA / "configs", reports=DATA / "field_reports.jsonl"))
    shipped = coefficients()
    for row in rows:
        if row.carries_bar:
            low, high = row.pool_interval(shipped)
            planned = row.planned_pool(shipped)
            name = reported(row.name)
            found.append(
                StartRow(
                    name, row.source, int(planned), row.pool, int(low), int(high), row.device,
                    row.chosen.flags.gpu or "not named",
                )
            )  # fmt: skip
    unseen, unplanned = published.load(
        Inputs(configs=DATA / "configs", published=DATA / "startups/published.jsonl")
    )
    for item in unseen:
        plan = published.planned(item)
        low, high = plan.intervals["kv_pool_bytes"]
        source = item.source.partition(" :: ")[0].removeprefix("https://").rstrip("/")
        found.append(
            StartRow(
                f"{item.name} of `published.jsonl`", source, plan.rank.kv_pool_bytes, item.pool, int(low),
                int(high), plan.rank.total_bytes, item.kind, fitted=False,
            )
        )  # fmt: skip
    return found, [*left_out, *others, *unplanned]


def summed(found: list[StartRow]) -> str:
    """Return the table cells that summarize ``found``."""
    errors = sorted(abs(line.error) for line in found)
    inside = sum(line.low <= line.printed <= line.high for line in found)
    return (
        f"{len(found)} | {100 * mean(errors):.2f} % | {100 * median(errors):.2f} % | "
        f"{100 * errors[int(0.9 * len(errors))]:.2f} % | {100 * errors[-1]:.2f} % | {inside}"
    )


def page(found: list[StartRow], left_out: list[str]) -> str:
    """Return the page as Markdown."""
    from accuracy.startups import SWEEP

    sweep = [line for line in found if line.source.endswith(SWEEP)]
    misses = [line for line in found if abs(line.error) > MISS]
    outside = [line for line in found if not line.low <= line.printed <= line.high]
    table = [
        f"| {line.name} | {100 * line.error:+.2f} % | {'**no**' if line in outside else 'yes'} |"
        f" {line.planned / 2**30:,.3f} | {line.printed / 2**30:,.3f} |"
        f" [{line.source.partition('/')[2]}](https://{line.source}) |"
        for line in sorted(found, key=lambda line: -abs(line.error))
    ]
    why: defaultdict[str, list[str]] = defaultdict(list)
    for words in sorted(set(left_out)):
        start, _, reason = words.partition(": ")
        why[reason].append(reported(start))
    return "\n".join(
        [
            "# Accuracy",
            "",
            "This page compares the KV pool of every public start-up log of vLLM on GPUs in the repository",
            "with the plan of `tonnage plan` for the same flags. Errors are in percent of the GPU's memory.",
            "`python benchmarks/accuracy_page.py` writes the page.",
            "",
            "| starts | | mean | median | nine of ten | worst | inside the interval |",
            "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
            f"| one sweep on H100s, vLLM 0.15 to 0.19 | {summed(sweep)} |",
            f"| other reports | {summed([line for line in found if line.fitted and line not in sweep])} |",
            f"| starts that nothing is fitted to | {summed([line for line in found if not line.fitted])} |",
            f"| all | {summed(found)} |",
            "",
            "Coefficients without a published source are fitted to the first two groups. For the errors with",
            "each source, each model and each kind of GPU left out of the fit, run",
            "`python benchmarks/planner_accuracy.py --sections startups pool_from_flags published`;",
            "the figures are in `benchmarks/README.md`.",
            "",
            "![Planned over printed](accuracy.svg)",
            "",
            "## By device",
            "",
            "| device | starts | mean | median | nine of ten | worst | inside the interval |",
            "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
            *(
                f"| {kind} | {summed([line for line in found if line.kind == kind])} |"
                for kind in sorted({line.kind for line in found})
            ),
            "",
            "## Misses",
            "",
            f"These starts are off by more than {100 * MISS:.1f} % of the GPU, or outside the plan's interval:",
            "",
            *(
                f"- {line.name}: {100 * line.error:+.2f} %{', outside' if line in outside else ''}"
                for line in found
                if line in misses or line in outside
            ),
            "",
            "## All",
            "",
            "The KV pool is in GiB, of the GPU with the smallest pool. Report numbers are lines of",
            "`tests/data/field_reports.jsonl`, counted from 0.",
            "",
            "| start | error | inside | planned | printed | source |",
            "| --- | ---: | --- | ---: | ---: | --- |",
            *table,
            "",
            f"## Left out: {len(left_out)}",
            "",
            *(f"- {reason}: {'; '.join(starts)}" for reason, starts in why.items()),
            "",
        ]
    )


def plot(found: list[StartRow]) -> str:
    """Return an SVG with the printed pool in GiB (logarithmic) and the error in percent of the GPU."""
    from math import log10

    width, height, left, bottom = 400, 260, 54, 36
    most = max(3.0, *(abs(100 * line.error) for line in found))
    low, high = min(line.printed for line in found), max(line.printed for line in found)

    def x(pool: float) -> float:
        return left + (width - left - 16) * (log10(pool) - log10(low)) / (log10(high) - log10(low))

    def y(percent: float) -> float:
        return (height - bottom) / 2 * (1 - percent / most) + 8

    bars = []
    for percent in (-100 * MISS, 0.0, 100 * MISS):
        at = f"{y(percent):.1f}"
        dashes = ' stroke-dasharray="4 4"' if percent else ' stroke-width="2"'
        bars.append(f'<line x1="{left}" x2="{width}" y1="{at}" y2="{at}" stroke="#8a929a"{dashes}/>')
        bars.append(f'<text x="4" y="{y(percent) + 4:.1f}">{percent:+.1f} %</text>')
    dots = []
    for line in found:
        at = f'cx="{x(line.printed):.1f}" cy="{y(100 * line.error):.1f}"'
        title = f"<title>{escape(line.name)}: {100 * line.error:+.2f} %</title>"
        dots.append(f'<circle {at} r="4" fill-opacity="0.6">{title}</circle>')
    ticks = [
        f'<text x="{x(gib * 2**30):.0f}" y="{height - 12}" text-anchor="middle">{gib} GiB</text>'
        for gib in (1, 3, 10, 30, 100, 300)
        if low <= gib * 2**30 <= high
    ]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img" font-family="sans-serif" font-size="13">'
        "<title>Error of the planned KV pool, of the GPU, by the pool printed</title>"
        "<style>text{fill:#1f2328}circle{fill:#3b6ea5}"
        "@media (prefers-color-scheme:dark){text{fill:#e6e8eb}circle{fill:#6ea3dc}}</style>"
    )
    return f"{head}{''.join((*bars, *ticks, *dots))}</svg>\n"


def main() -> int:
    """Write the page and its plot, or check them."""
    found, left_out = lines()
    made = {PAGE: page(found, left_out), PLOT: plot(found)}
    stale = [path for path, text in made.items() if not path.is_file() or path.read_text() != text]
    if "--check" in sys.argv:
        return len(stale) > 0
    for path in stale:
        path.write_text(made[path])
        print(f"written: {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
