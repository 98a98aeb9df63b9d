"""The reading path of cache/README.md stays short, and names files that exist."""

from __future__ import annotations

import sys

import documented
import pytest

sys.path.append(str(documented.ROOT / ".ci"))

import reading_path

CACHE = documented.ROOT / "cache"


@pytest.mark.parametrize("heading", ["Reading order", "Admission"])
def test_recommended_reading_order_lists_existing_files(heading: str) -> None:
    path = reading_path.reading_path(heading)
    assert len(path) >= 4
    assert not [each for each in path if not each.is_file()]


def test_cache_files_of_the_recommended_reading_order_have_at_most_2800_lines_with_imports() -> None:
    path = reading_path.reading_path()
    assert reading_path.lines(path) <= 1700
    assert reading_path.lines(path + reading_path.closure(path)) <= 2800


def test_cache_files_of_the_recommended_reading_order_import_no_optional_feature() -> None:
    path = reading_path.reading_path()
    names = {str(each.relative_to(CACHE)) for each in path + reading_path.closure(path)}
    features = (
        "manager.py",
        "admission/controller.py",
        "eviction/reuse.py",
        "prefix/events.py",
        "prefix/keyed.py",
    )
    assert not names & set(features)
    assert not [name for name in names if name.startswith(("laws/", "disk/", "replay/"))]
