"""Requests of given lengths: ``tonnage plan --request 2000+300``."""

from __future__ import annotations

from collections.abc import Iterable

from tonnage.planner.errors import DeploymentError
from tonnage.planner.planning.terms import request_terms
from tonnage.planner.plans import Plan
from tonnage.planner.records import replace
from tonnage.planner.units import parse_count

FLAG = "--request"


def parse_request(text: str) -> tuple[int, int]:
    """``2000+300``: (tokens of the prompt, of the answer), each at least one, with vLLM's suffixes (8k, 8K).
    Raises DeploymentError."""
    parts = text.split("+")
    if len(parts) != 2:
        raise DeploymentError(
            f"{text[:40]!r} is not PROMPT+OUTPUT", field=FLAG, hint="tokens of both, for example 2000+300"
        )
    prompt, output = (parse_count(part, FLAG) for part in parts)
    return prompt, output


def with_requests(plan: Plan, lengths: Iterable[tuple[int, int]]) -> Plan:
    """``plan`` with how many requests of each (prompt, output) its pool holds. Raises as Plan.hold."""
    found = tuple(plan.hold(prompt, output) for prompt, output in lengths)
    plan = replace(plan, requests=found)
    return replace(plan, terms=(*plan.terms, *request_terms(plan)))
