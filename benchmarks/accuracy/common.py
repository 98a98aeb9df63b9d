"""Parts shared by the sections: inputs, a section's scores, and readers of the data files."""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tonnage.planner.model.fields import parse_config


@dataclass(frozen=True)
class Inputs:
    """Paths from the command line; None for a path that is not given."""

    configs: Path | None = None
    truth: Path | None = None
    checkpoints: Path | None = None
    vllm: Path | None = None
    reports: Path | None = None
    receipts: Path | None = None
    startups: Path | None = None
    published: Path | None = None

    def config(self, name: str) -> dict[str, Any] | None:
        """Return config.json of ``org/model`` or ``org__model``, or None if the folder does not have it.

        ``hf_quant_config.json`` is merged in, as when the planner reads a folder.
        """
        path = self.config_path(name)
        return None if path is None else parse_config(path.read_bytes(), str(path))

    def config_path(self, name: str) -> Path | None:
        """Return the path of a model's config, in the configs folder or beside the start-ups, or None."""
        stem = name.replace("/", "__", 1)
        for folder in (self.configs, *(path.parent for path in (self.startups, self.published) if path)):
            for path in (folder / stem / "config.json", folder / f"{stem}.json") if folder else ():
                if path.is_file():
                    return path
        return None

    def names(self) -> list[str]:
        """Return the names of all models with a config in the folder, sorted."""
        if self.configs is None:
            return []
        folders = {path.parent.name for path in self.configs.glob("*/config.json")}
        return sorted(
            folders | {path.stem for path in self.configs.glob("*__*.json") if not path.stem.endswith(".quant")}
        )


def read_tsv(path: Path, *required: str) -> list[dict[str, str]]:
    """Return the rows of a table; a missing column reads as empty.

    Raises:
        SystemExit: one of the ``required`` columns is missing.
    """
    with path.open(newline="") as file:
        table = csv.DictReader(file, delimiter="\t", restval="")
        missing = [name for name in required if name not in (table.fieldnames or ())]
        if missing:
            raise SystemExit(f"{path}: no column {', '.join(missing)}")
        return [Record(row, absent="") for row in table]


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Return the reports, one per line; a missing field reads as null."""
    rows = []
    for line in path.read_text().splitlines():
        if line.strip():
            row = Record(json.loads(line), absent=None)
            row["observed"] = Record(row["observed"] or {}, absent=None)
            row["engine"], row["model"] = row["engine"] or "", row["model"] or "a model without a name"
            rows.append(row)
    return rows


class Record(dict[str, Any]):
    """A row whose missing fields read as ``absent``."""

    def __init__(self, row: dict[str, Any], *, absent: Any) -> None:
        super().__init__(row)
        self.absent = absent

    def __missing__(self, key: str) -> Any:
        return self.absent


@dataclass
class Section:
    """The scores of one section.

    Attributes:
        rows: Number of rows.
        errors: Relative errors of the scored rows.
        exact: Number of rows without error.
        refused: Rows that the planner refuses, with the reason.
        covered: Number of rows whose true value lies in the planner's interval; None for a section without
            intervals.
        misses: Rows with an error, in words.
        extra: Further figures of the section.
    """

    rows: int = 0
    errors: list[float] = field(default_factory=list)
    exact: int = 0
    refused: list[str] = field(default_factory=list)
    covered: int | None = None
    misses: list[str] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)

    def add(self, name: str, planned: float, truth: float, note: str = "") -> None:
        """Score one row: exact if equal, else a miss with its relative error."""
        self.rows += 1
        error = abs(planned - truth) / abs(truth) if truth else float(planned != truth)
        self.errors.append(error)
        if planned == truth:
            self.exact += 1
        else:
            self.misses.append(f"{name}: planned {planned:,} truth {truth:,} {note}".rstrip())

    def refuse(self, name: str, why: object) -> None:
        """Count a row that the planner refuses."""
        self.rows += 1
        self.refused.append(f"{name}: {why}")

    def to_json(self) -> dict[str, Any]:
        """Return the scores as a JSON object."""
        errors = sorted(self.errors)

        def at(share: float) -> float | None:
            return errors[min(len(errors) - 1, int(share * len(errors)))] if errors else None

        return {
            "rows": self.rows,
            "scored": len(errors),
            "refused": self.refused,
            "exact": self.exact,
            "median_error": at(0.5),
            "p90_error": at(0.9),
            "worst_error": errors[-1] if errors else None,
            "covered": self.covered,
            "misses": self.misses,
            **self.extra,
        }
