"""Write docs/alerts.md, the page of all alerts, from the alert rules.

    python deploy/prometheus/alerts_page.py

The rules state what each alert means and what to do (annotations `summary`, `description` and `runbook`), so
that the page, the alert and its notification say the same. A test compares the page with the rules.
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "deploy/prometheus/rules/alerts.yml"
PAGE = ROOT / "docs/alerts.md"
_SEVERITIES = {"page": "act now", "ticket": "within a working day"}
_WIDTH = 120
_INTRO = """# Alerts

The {count} alert rules in `deploy/prometheus/rules` (in the Helm chart `prometheusRule`), what each means and
what to do. An alert's `runbook` annotation has the same text. Begin with the dashboard Overview
([Dashboards, rules, alerts](operations.md#dashboards-rules-alerts)). This page is generated from the rules.

`page` means that an alert needs immediate action, `ticket` that it can wait for the next working day. Words in
italics stand for the alert's own values.
"""


def page() -> str:
    """Return the page of all alerts as Markdown."""
    groups = yaml.safe_load(RULES.read_text())["groups"]
    alerts = [(group["name"], rule) for group in groups for rule in group["rules"] if "alert" in rule]
    rows = ["| alert | severity | after |", "| --- | --- | --- |"]
    for _, rule in alerts:
        name, severity = rule["alert"], rule["labels"]["severity"]
        rows.append(f"| [{name}](#{name.lower()}) | {severity}: {_SEVERITIES[severity]} | {_after(rule)} |")
    parts = [_INTRO.format(count=len(alerts)), "\n".join(rows), ""]
    before = ""
    for group, rule in alerts:
        if group != before:
            parts.append(f"## {group.removeprefix('tonnage-').capitalize()}\n")
            before = group
        parts.append(_section(rule))
    return "\n".join(parts)


def _section(rule: dict[str, Any]) -> str:
    said = rule["annotations"]
    summary = re.sub(r"^\*instance\*: ", "", _plain(said["summary"]))
    lines = [
        f"### {rule['alert']}",
        "",
        f"{summary[:1].upper()}{summary[1:].rstrip('.')}. {_plain(said['description'])}",
        "",
        f"**What to do.** {_plain(said['runbook'])}",
        "",
    ]
    return "\n".join(_wrapped(line) for line in lines)


def _after(rule: dict[str, Any]) -> str:
    """Return how long an alert's condition has to hold."""
    if "for" not in rule:
        return "at once"
    unit = {"m": "min", "s": "s", "h": "h"}[rule["for"][-1]]
    return f"{rule['for'][:-1]} {unit}"


def _plain(text: str) -> str:
    """Return an annotation with words in italics instead of its template's expressions."""
    text = re.sub(r"\{\{ if .*? \}\}(.*?)\{\{ else \}\}.*?\{\{ end \}\}", r"\1", text)
    text = re.sub(r"\{\{ *\$labels\.(\w+) *\}\}", r"*\1*", text)
    text = re.sub(r"\{\{ *\$value *(?:\| *\w+ *)?\}\}", "*value*", text)
    return " ".join(text.split())


def _wrapped(line: str) -> str:
    if not line:
        return line
    return "\n".join(textwrap.wrap(line, _WIDTH, break_long_words=False, break_on_hyphens=False))


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"written: {PAGE.relative_to(ROOT)}")
