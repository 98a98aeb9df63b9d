"""Compare planned KV tiers with published facts: bytes taken, bytes of a block, hits that are impossible.

    python benchmarks/tiers_truth.py                 one line for each fact and each verdict
    python benchmarks/tiers_truth.py --json --check  one JSON object; exit code 1 if a compared fact differs, or
                                                     if fewer than 80 % of the verdicts have the published sign

tests/data/tiers_truth.jsonl has the facts with their sources. A fact is compared if it names the model and the
flags that decide its figure. The others are listed with the reason why they are not. tier_verdicts.py has the
published pairs of a server with and without a tier.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tier_verdicts import PAIRS, judge

from tonnage.planner.engines.vllm.tier import pinned_tensors
from tonnage.planner.planning.build import plan_source
from tonnage.planner.planning.deployment import deployment_of
from tonnage.planner.plans import Plan
from tonnage.planner.source.resolve import ModelSource

DATA = Path(__file__).parent.parent / "tests" / "data"
FACTS = DATA / "tiers_truth.jsonl"
GiB = 1 << 30
SIGNS = 0.8  # share of the verdicts whose sign must be the published one
PINNED = 0.02  # tolerance where pinned memory was measured
# Config with the same layers, KV heads and head size, where the fact's own model is not stored.
SAME = {
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B": "Qwen/Qwen2.5-32B",
    "meta-llama/Llama-3.1-8B-Instruct": "meta-llama/Meta-Llama-3.1-8B",
    "meta-llama/Llama-3.2-1B-Instruct": "meta-llama/Llama-3.2-1B",
    "meta-llama/Llama-3.1-70B-Instruct": "meta-llama/Llama-3.1-70B-Instruct",
    "meta-llama/Llama-3.3-70B-Instruct": "meta-llama/Llama-3.1-70B-Instruct",
    "Qwen/Qwen2.5-7B-Instruct": "Qwen/Qwen2.5-7B",
    "Qwen/Qwen3-0.6B": "Qwen/Qwen3-0.6B",
    "Qwen/Qwen3-4B-Instruct-2507": "Qwen/Qwen3-4B",
    "Qwen/Qwen2.5-3B-Instruct": "Qwen/Qwen2.5-3B",
    "mistralai/Mistral-Small-24B-Instruct-2501": "cognitivecomputations/Dolphin3.0-R1-Mistral-24B",
}
# The 70B row of the blog does not name its ranks; 8 KB of 16 tokens are two KV heads, which 4 ranks have.
RANKS = {"meta-llama/Llama-3.1-70B-Instruct": 4}


@dataclass(frozen=True)
class Compared:
    """A published fact beside its planned figure.

    Attributes:
        row: Index of the fact in its file.
        what: The figure that is compared, with its unit.
        planned: The planned figure; None if the fact is not compared.
        published: The published figure; None if the fact is not compared.
        difference: Planned over published - 1.
        tolerance: Largest difference that agrees.
        agrees: Whether the figures agree; None if the fact is not compared.
        reason: Why the fact is not compared, or how the figure follows.
    """

    row: int
    source: str
    model: str
    what: str
    planned: float | None
    published: float | None
    difference: float | None
    tolerance: float | None
    agrees: bool | None
    reason: str


def plan_of(model: str, **flags: Any) -> Plan:
    """Return the plan of a model whose config is stored with the tests."""
    config = json.loads((DATA / "configs" / f"{model.replace('/', '__')}.json").read_text())
    return plan_source(ModelSource(model, model, config, "hub"), deployment_of({"gpu": "h200", **flags}))


def compare(row: int, fact: dict[str, Any]) -> list[Compared]:
    """Return the comparisons of one fact; one with a reason if nothing can be compared."""
    model = fact["model"] or "not named"

    def result(what: str, planned: float, published: float, tolerance: float, reason: str) -> Compared:
        difference = planned / published - 1 if published else planned
        return Compared(row, fact["source"], model, what, planned, published, difference, tolerance,
                        abs(difference) <= tolerance, reason)  # fmt: skip

    if fact["tier"] == "transfer unit":
        return _transfer_unit(fact, result) if model in SAME else [_left_out(row, fact, "no config is stored")]
    if "24 tensors a rank" in fact["fact"]:
        ranks = fact["tp"]
        planned = ranks * pinned_tensors(fact["requested_bytes"] // ranks, 24)
        return [
            result("bytes taken on the node", planned, fact["allocated_bytes"], PINNED, "24 tensors a rank")
        ]
    if model in SAME and "LMCACHE_MAX_LOCAL_CPU_SIZE" in (fact["flags"] or ""):
        return _cyclic(fact, result)
    return [_left_out(row, fact, _why(fact))]


def _transfer_unit(fact: dict[str, Any], result: Callable[..., Compared]) -> list[Compared]:
    """Compare the contiguous bytes of a block: one of K and V of a layer before 0.12, all layers since."""
    before, since = fact["fact"].split(": ")[1].split(", ")
    ranks = fact["tp"] or RANKS[fact["model"]]
    layout = plan_of(SAME[fact["model"]], tensor_parallel_size=ranks, max_model_len=2048).kv_cache.layout
    small, large = float(before.split(" KB")[0]), float(since.split(" MB")[0])
    digits = len(since.split(" MB")[0].partition(".")[2])
    # The blog rounds to its last digit; 0.87 of 0.875 is cut, so a whole unit of it is allowed.
    return [
        result("KiB of a block before 0.12", layout.slot_bytes / 2 / 1024, small, 0.0, "K or V of one layer"),
        result("MiB of a block since 0.12", layout.bytes_per_block / 1024**2, large, 10**-digits / large,
               "K and V of all layers, rounded in the source"),
    ]  # fmt: skip


def _cyclic(fact: dict[str, Any], result: Callable[..., Compared]) -> list[Compared]:
    """Compare hits of documents read in turn: LRU hits nothing if the tier is smaller than all of them."""
    size = float(fact["flags"].split("SIZE=")[1].split()[0])
    config = {
        "kv_connector": "LMCacheConnectorV1",
        "kv_connector_extra_config": {"lmcache.max_local_cpu_size": size},
    }
    plan = plan_of(SAME[fact["model"]], tensor_parallel_size=fact["tp"], max_model_len=16384,
                   kv_transfer_config=json.dumps(config))  # fmt: skip
    (tier,) = plan.tiers
    asked = 50 * 10_000  # documents and tokens of each, by the report
    planned = 0.0 if (tier.tokens or 0) < asked else 1.0
    return [result("hit rate of the query round", planned, fact["hit_rate_tier"], 0.0,
                   f"the tier holds {tier.tokens:,} of {asked:,} tokens that are read in turn")]  # fmt: skip


def _why(fact: dict[str, Any]) -> str:
    if fact["tier_tokens"]:
        return "the KV cache's dtype or the model's config is not published"
    if fact["ttft_s_without"] is not None or fact["throughput_without"] is not None:
        return "times with and without; arrivals or flags are not published"
    if fact["hit_rate_tier"] is not None or fact["hit_rate_total"] is not None:
        return "a hit rate; the requests are not published"
    return "no figure that flags and model decide"


def _left_out(row: int, fact: dict[str, Any], reason: str) -> Compared:
    model = fact["model"] or "not named"
    return Compared(row, fact["source"], model, fact["tier"], None, None, None, None, None, reason)


def verdicts() -> list[dict[str, Any]]:
    """Return the replay's verdict on each published pair."""
    found = []
    for pair in PAIRS:
        verdict = judge(pair, plan_of)
        found.append(
            {"source": pair.source, "published_pays": pair.pays, "pays": verdict.pays,
             "right": verdict.pays == pair.pays, "change_of_mean_first_token": round(verdict.change, 4),
             "verdict": verdict.sentence(), "assumed": pair.assumed}
        )  # fmt: skip
    return found


def main() -> int:
    """Print the comparisons; return 1 with --check if a figure differs or too many verdicts are wrong."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--check", action="store_true", help="exit code 1 if a compared fact differs")
    arguments = parser.parse_args()
    facts = [json.loads(line) for line in FACTS.read_text().splitlines()]
    found = [compared for row, fact in enumerate(facts) for compared in compare(row, fact)]
    compared = [one for one in found if one.agrees is not None]
    agreeing = sum(bool(one.agrees) for one in compared)
    judged = verdicts()
    right = sum(one["right"] for one in judged)
    if arguments.json:
        record = {"facts": len(facts), "compared": len(compared), "agreeing": agreeing,
                  "facts_compared": len({one.row for one in compared}),
                  "verdicts": judged, "verdicts_right": right,
                  "rows": [asdict(one) for one in found]}  # fmt: skip
        print(json.dumps(record))
    else:
        for one in found:
            if one.agrees is None:
                print(f"{one.row:>2}  {one.model[:40]:<40} not compared: {one.reason}")
            else:
                verdict = "agrees" if one.agrees else "DIFFERS"
                print(f"{one.row:>2}  {one.model[:40]:<40} {one.what}: planned {one.planned:,.6g}, published "
                      f"{one.published:,.6g}, {verdict}")  # fmt: skip
        print(f"{agreeing} of {len(compared)} figures of {len({one.row for one in compared})} facts agree; "
              f"{len(facts)} facts are published")  # fmt: skip
        for pair in judged:
            word = "right" if pair["right"] else "WRONG"
            sign = "pays" if pair["published_pays"] else "does not pay"
            print(f"{pair['source']}: published {sign}, {word}. {pair['verdict']} Assumed: {pair['assumed']}.")
        print(f"{right} of {len(judged)} verdicts have the published sign")
    return int(arguments.check and (agreeing < len(compared) or right < SIGNS * len(judged)))


if __name__ == "__main__":
    sys.exit(main())
