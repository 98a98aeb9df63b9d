"""Comparison of the plans for two engine versions (`tonnage plan --compare A B`), with reasons.

The deployment is also planned for every version in between at which a planning rule changed. Each difference
can thus be attributed to one release.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass, replace
from typing import Any

from tonnage.planner.deployment import Deployment
from tonnage.planner.engines.registry import engine_of
from tonnage.planner.engines.version import Version, parse_version
from tonnage.planner.errors import DeploymentError, TonnageError
from tonnage.planner.output.tables import Table, print_table
from tonnage.planner.output.terminal import for_this_cpu
from tonnage.planner.planning.build import plan_source
from tonnage.planner.planning.size import Sizer
from tonnage.planner.plans import Plan
from tonnage.planner.screen import Screen
from tonnage.planner.source.resolve import ModelSource
from tonnage.planner.sweep.page import write_upgrade_page
from tonnage.planner.units import gib

# Flags whose default value depends on the engine's version
_DEFAULTS = (
    "gpu_memory_utilization", "dtype", "kv_cache_dtype", "max_model_len", "max_num_seqs",
    "max_num_batched_tokens", "block_size", "enable_prefix_caching",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ReleaseChange:
    """A release of an engine that changes the plan of a deployment.

    Attributes:
        version: version number of the release.
        reasons: the changes in the engine that affect the plan.
        before: numbers of the plan for the version before the release, by name.
        after: numbers of the plan for the release, by name.
    """

    version: str
    reasons: tuple[str, ...]
    before: dict[str, Any]
    after: dict[str, Any]

    @property
    def changed(self) -> tuple[str, ...]:
        """Return the names of the numbers in the plan that this release changes."""
        return tuple(name for name, value in self.after.items() if self.before.get(name) != value)


@dataclass(frozen=True, slots=True)
class Upgrade:
    """The plans of a deployment before and after an engine upgrade, and the releases that change the plan."""

    before: Plan
    after: Plan
    steps: tuple[ReleaseChange, ...]


def compare_versions(source: ModelSource, deployment: Deployment, since: str, until: str) -> Upgrade:
    """Plan a deployment for two engine versions and for the versions between them.

    Args:
        source: the model's config and tensor headers.
        deployment: the flags that both plans share.
        since: the version to upgrade from.
        until: the version to upgrade to.

    Raises:
        DeploymentError: a version is not a release, or no planning rule of the engine depends on its version.
        TonnageError: a plan under one of the two versions is not possible.
    """
    engine = engine_of(deployment.engine)
    first, last = _release(since), _release(until)
    if not any(engine.newest):
        raise DeploymentError(
            f"no rule of {engine.name} depends on its version, so all its versions have the same plan",
            field="--compare",
        )
    low, high = sorted((first, last))
    sizer = Sizer(source)

    def plan(version: str) -> Plan:
        return plan_source(source, replace(deployment, engine_version=version), sizer)

    before = plan(since if low == first else until)
    steps, known = [], terms_of(before)
    for version, reasons in engine.changes(low, high):
        text = ".".join(map(str, version))
        try:
            found = terms_of(plan(text))
        except TonnageError:  # This engine version, between `since` and `until`, rejects the deployment.
            continue
        if found != known:
            steps.append(ReleaseChange(text, reasons, known, found))
            known = found
    after = plan(until if low == first else since)
    found = terms_of(after)
    if found != known:  # no known change of the engine explains these differences between the plans
        steps.append(ReleaseChange(until if low == first else since, (), known, found))
    if low != first:
        before, after = after, before
        steps = [replace(step, before=step.after, after=step.before) for step in reversed(steps)]
    return Upgrade(before, after, tuple(steps))


def _release(text: str) -> Version:
    try:
        version = parse_version(text)
    except DeploymentError:
        version = (0, 0, 0)
    if not any(version):
        raise DeploymentError(
            f"{text!r} is not a release number", field="--compare", hint="for example --compare 0.25.1 0.26.0"
        )
    return version


def terms_of(plan: Plan) -> dict[str, Any]:
    """Return a dict: name -> value, for all numbers of a plan that may differ between engine versions."""
    rank, cache, layout = plan.rank, plan.kv_cache, plan.kv_cache.layout
    found: dict[str, Any] = {
        "weights_bytes": rank.weights_bytes + rank.lora_bytes + rank.draft_bytes,
        "activation_bytes": rank.activation_bytes,
        "framework_bytes": rank.framework_bytes,
        "cuda_graph_bytes": rank.cuda_graph_bytes,
        "kv_pool_bytes": rank.kv_pool_bytes,
        "bytes_per_sequence": cache.bytes_per_sequence,
        "bytes_per_block": layout.bytes_per_block if layout.groups else 0,
        "num_blocks": cache.num_blocks,
        "tokens": cache.tokens,
        "max_concurrency": round(cache.max_concurrency, 2),
        "host_bytes": 0 if plan.host is None else plan.host.value,
    }
    flags = plan.deployment
    found |= {name: getattr(flags, name) for name in _DEFAULTS}
    return found | {"fits": plan.fits}


def run_compare(source: ModelSource, deployment: Deployment, args: argparse.Namespace) -> int:
    """Print the comparison of the plans for the two engine versions of --compare.

    Returns exit code 0 if both plans fit, else 1.
    """
    since, until = args.compare
    if args.engine is None and not any(engine_of(deployment.engine).newest):
        deployment = replace(deployment, engine="vllm")  # the default engine is vllm, as for --sweep
    upgrade = compare_versions(source, deployment, since, until)
    before, after = terms_of(upgrade.before), terms_of(upgrade.after)
    if args.html:
        plan = upgrade.after
        facts = (("model", plan.model.id), ("engine", f"{plan.deployment.engine} {since} and {until}"),
                 ("device", plan.device_name()))  # fmt: skip
        write_upgrade_page(
            args.html, _headline(upgrade, since, until), ("term", since, until, "difference"), _rows(upgrade),
            _reasons(upgrade, since, until), _steps(upgrade), args.words, facts,
        )  # fmt: skip
    if args.json:
        print(json.dumps(_as_dict(upgrade, since, until), indent=2))
    elif args.csv or args.markdown:
        rows = tuple(
            (name, before[name], after[name], _difference(before[name], after[name])) for name in before
        )
        print_table(Table(("term", since, until, "difference"), rows), sys.stdout, markdown=args.markdown)
    else:
        if line := for_this_cpu(upgrade.after, args.gpu, args.device, args.device_memory):
            print(line)
        _print(upgrade, since, until)
    return 0 if upgrade.before.fits and upgrade.after.fits else 1


def _as_dict(upgrade: Upgrade, since: str, until: str) -> dict[str, Any]:
    before, after = terms_of(upgrade.before), terms_of(upgrade.after)
    return {
        "from": since,
        "to": until,
        "terms": {name: {"from": before[name], "to": after[name]} for name in before},
        "steps": [
            {
                "version": step.version,
                "reasons": list(step.reasons),
                "terms": {name: {"from": step.before[name], "to": step.after[name]} for name in step.changed},
            }
            for step in upgrade.steps
        ],
        "stops_with": {"from": upgrade.before.stops_with, "to": upgrade.after.stops_with},
        "reasons": {"from": list(upgrade.before.reasons), "to": list(upgrade.after.reasons)},
    }


def _print(upgrade: Upgrade, since: str, until: str) -> None:
    screen = Screen(sys.stdout)
    for line in _headline(upgrade, since, until):
        screen.print(line)
    screen.print()
    for name, *figures, difference in (("", since, until, "difference"), *_rows(upgrade)):
        screen.print_line(f"{name:<24}" + "".join(f"{figure:>18}" for figure in figures) + f"{difference:>14}")
    for line in _reasons(upgrade, since, until):
        screen.print(line)
    screen.print()
    if not upgrade.steps:
        screen.print("No release between changes this plan.")
    for release, did in _steps(upgrade):
        screen.print(release)
        screen.print(f"    {did}")


def _headline(upgrade: Upgrade, since: str, until: str) -> tuple[str, str]:
    flags = upgrade.after.deployment
    where = f"on {upgrade.after.device_name()}, max_model_len {flags.max_model_len:,}"
    return upgrade.after.headline()[0], f"{flags.engine} {since} -> {until} {where}"


def _rows(upgrade: Upgrade) -> list[tuple[str, str, str, str]]:
    """Return table rows (name, value before, value after, difference) of the plans' numbers.

    Numbers that are zero in both plans are left out.
    """
    before, after = terms_of(upgrade.before), terms_of(upgrade.after)
    return [
        (_term_name(name), _shown(name, value), _shown(name, after[name]), _difference(value, after[name]))
        for name, value in before.items()
        if value or after[name]
    ]


def _reasons(upgrade: Upgrade, since: str, until: str) -> list[str]:
    lines = []
    for version, plan in ((since, upgrade.before), (until, upgrade.after)):
        lines += [f"{version} does not fit: {reason}" for reason in plan.reasons]
        if plan.stops_with is not None:
            lines.append(f"{version} stops with: {plan.stops_with}")
    return lines


def _steps(upgrade: Upgrade) -> list[tuple[str, str]]:
    """Return two texts for each release: the release with its reasons, and the numbers that it changes."""
    lines = []
    for step in upgrade.steps:
        told = [name for name in step.changed if name != "max_concurrency" or "tokens" not in step.changed]
        release = f"{step.version}: {'; '.join(step.reasons) or 'no rule known here'}"
        lines.append((release, ", ".join(_change_text(name, step) for name in told)))
    return lines


def _change_text(name: str, step: ReleaseChange) -> str:
    old, new = step.before[name], step.after[name]
    difference = _difference(old, new)
    return f"{_term_name(name)} {difference or f'{_shown(name, old)} -> {_shown(name, new)}'}"


def _term_name(name: str) -> str:
    return name.removesuffix("_bytes").replace("_", " ").replace("cuda", "CUDA").replace("kv", "KV")


def _shown(name: str, value: Any) -> str:
    if name.endswith("_bytes") or name.startswith("bytes_per"):
        return gib(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _difference(before: Any, after: Any) -> str:
    """Return the change of a plan's number as text: in percent, or as a factor above 2 or below 0.5."""
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in (before, after))
    if not numbers or before == after or not before:
        return ""
    ratio = after / before
    return f"{100 * (ratio - 1):+.1f} %" if 0.5 <= ratio <= 2 else f"x {ratio:.2f}"
