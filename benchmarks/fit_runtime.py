"""Fit the GPU runtime model to start-up reports and write planner/engines/runtime/fitted.json.

    python benchmarks/fit_runtime.py [--reports FILE.jsonl] [--configs DIR] [--startups DIR] [--write]

It prints the coefficients and the error on left-out sources; --write stores them.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    """Fit the coefficients, print them with their errors, and store them with ``--write``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reports", type=Path, default=ROOT / "tests/data/field_reports.jsonl")
    parser.add_argument("--configs", type=Path, default=ROOT / "tests/data/configs")
    parser.add_argument(
        "--startups", type=Path, default=ROOT / "tests/data/startups", help="folder of starts and configs"
    )
    parser.add_argument("--write", action="store_true", help="write planner/engines/runtime/fitted.json")
    options = parser.parse_args()
    from accuracy.common import Inputs
    from accuracy.pool_from_flags import score
    from accuracy.runtime_fit import fit, load_rows
    from accuracy.startups import load, row

    inputs = Inputs(configs=options.configs, reports=options.reports)
    rows, _ = load_rows(inputs)
    starts = sorted(options.startups.glob("*.jsonl"))
    more = [row(start) for path in starts for start in load(Inputs(configs=options.startups, startups=path))[0]]
    rows += more
    fitted = fit(rows)
    section = score(inputs, more)
    assert section is not None
    scored = section.to_json()
    out = {
        "coefficients": asdict(fitted),
        "fitted_to": f"{', '.join(path.name for path in (options.reports, *starts))}: "
        f"{len(rows)} starts, {len({r.source for r in rows})} sources",
        "left_out_one_source_at_a_time": {
            key: scored[key] for key in ("rows", "median_error", "p90_error", "worst_error", "covered")
        },
    }
    if options.write:
        target = ROOT / "planner/engines/runtime/fitted.json"
        target.write_text(json.dumps(out, indent=1) + "\n")
    print(json.dumps(out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
