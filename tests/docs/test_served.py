"""What README and docs show of a running server is what such servers say (tests/helpers/served.py)."""

from __future__ import annotations

import doctest
from collections.abc import Iterator
from pathlib import Path

import documented
import pytest
from served import HERE, Servers, compared, servers

PAGES = documented.asking_pages()


@pytest.fixture(scope="module")
def asking() -> Iterator[Servers]:
    with documented.models(), servers() as asking:
        yield asking


@pytest.fixture(scope="module")
def made(asking: Servers) -> dict[Path, str]:
    """Each page as it is when its commands are run, one page after the other, by the same servers."""
    return {page: documented.again(page.read_text(), asking) for page in PAGES}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_documented_server_output_equals_the_real_output(page: Path, made: dict[Path, str]) -> None:
    assert made[page] == page.read_text(), "python tests/helpers/documented.py writes what they say now"


def test_documented_client_examples_print_the_documented_output(
    asking: Servers, made: dict[Path, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NO_PROXY", "*")
    text = (documented.ROOT / "docs/openai.md").read_text().replace(HERE, asking.address())
    example = doctest.DocTestParser().get_doctest(text, {}, "openai.md", None, 0)
    assert len(example.examples) >= 15
    assert doctest.DocTestRunner().run(example).failed == 0, capsys.readouterr().out


def test_tests_find_the_documentation_pages_with_server_commands() -> None:
    asked = {page.name for page in PAGES}
    assert asked >= {"index.md", "install.md", "operations.md", "admit.md", "measure.md"}


@pytest.mark.parametrize(
    ("shown", "printed"),
    [
        ("kv_pool  64,880,640 (61.9 MiB)", "kv_pool  64,880,641 (61.9 MiB)"),
        ("running   2 of at most 2, the longest for 0.4 s", "running   1 of at most 2, the longest for 0.4 s"),
        ('{"text":" Paris","created":1}', '{"text":" London","created":1}'),
        ("framework  1 (1.0 MiB)  2 (1.0 MiB)", "framework  1 (1.0 MiB)"),
        ('tonnage_pool_bytes{state="free"} 1.0', 'tonnage_pool_bytes{state="free"} 2.0'),
    ],
)
def test_documented_output_with_a_wrong_fixed_value_is_reported(shown: str, printed: str) -> None:
    assert compared([shown]) != compared([printed])


@pytest.mark.parametrize(
    ("shown", "printed"),
    [
        ("framework  1,024 (1.0 MiB)  +7 (0.1 %)", "framework   2,048,000 (2.0 GiB)  -3 (2.5 %)"),
        ("ready since 2026-11-23 09:01:38 (2 h 4 min): demo", "ready since 2026-11-24 19:41:00 (1.2 s): demo"),
        ("plan 8d829ecfb38b9eea", "plan 4e668a6313115162"),
        ('{"id":"cmpl-0a8d","created":17}', '{"id":"cmpl-142d","created":18}'),
        ('x{device="cpu",component="free"} 2.4e+10', 'x{device="cpu",component="free"} 23.0'),
    ],
)
def test_documented_output_that_differs_only_in_measured_values_counts_as_equal(
    shown: str, printed: str
) -> None:
    assert compared([shown]) == compared([printed])
