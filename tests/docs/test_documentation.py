"""What README and docs show is what the commands print, and what they link to is there."""

from __future__ import annotations

import doctest
import re
import subprocess
import sys
from pathlib import Path

import documented
import pytest
from shown import how_exact

from tonnage import planner

LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]*)(#[^)\s]*)?\)")
# What Sphinx reads as a link: the site and help() print it as it stands.
ROLE = re.compile(r":(?:py:)?(?:attr|class|const|data|exc|func|meth|mod|obj|ref):`")
PAGES = [documented.ROOT / "README.md", *sorted((documented.ROOT / "docs").rglob("*.md"))]


def anchors(text: str) -> set[str]:
    """Of the headings, as GitHub and Python-Markdown make them."""
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", documented.pages(), ids=lambda page: page.name)
def test_documented_command_output_equals_the_real_output(page: Path) -> None:
    text = page.read_text()
    with documented.models():
        made = documented.again(text)
    assert made == text, "python tests/helpers/documented.py writes what the commands print now"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_and_anchors_in_the_documentation_exist(page: Path) -> None:
    for target, anchor in LINK.findall(page.read_text()):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        found = (page.parent / target).resolve() if target else page  # an anchor of its own
        assert found.exists(), target
        if anchor and found.suffix == ".md":
            assert anchor[1:] in anchors(found.read_text()), target + anchor


def test_documented_python_examples_print_the_documented_output() -> None:
    with documented.models():
        found = doctest.testfile(str(documented.ROOT / "docs/python.md"), module_relative=False)
    assert found.attempted >= 4
    assert found.failed == 0


def test_documentation_of_the_python_api_lists_every_public_name() -> None:
    listed = re.findall(
        r"^::: tonnage\.planner\.(\w+)$", (documented.ROOT / "docs/python.md").read_text(), re.MULTILINE
    )
    assert sorted(listed) == sorted(planner.__all__)


def test_every_page_with_python_examples_is_tested() -> None:
    """openai.md by test_served.py, mechanism.md by test_mechanism.py."""
    pages = {page.name for page in PAGES if ">>> " in page.read_text()}
    assert pages == {"python.md", "openai.md", "mechanism.md"}


def test_figures_in_the_readme_equal_the_plan() -> None:
    with documented.models():
        from tonnage.planner import plan

        found = plan("meta-llama/Meta-Llama-3.1-8B", gpu="h100-80g", engine_version="0.33.0")
    low, high = found.intervals["num_blocks"]
    text = (documented.ROOT / "planner/README.md").read_text()
    for figure in (
        f"{found.rank.activation_bytes:,} for a forward pass",
        f"in blocks of 2,097,152 bytes: {found.kv_cache.num_blocks:,}\n",
        f"{low:,} to {high:,} blocks",
        f"weights {found.rank.weights_bytes:,} bytes",
    ):
        assert figure in text, figure


def test_number_of_models_in_the_readme_equals_that_in_the_test_data() -> None:
    counted = (documented.ROOT / "tests/data/configs/param_truth.tsv").read_text().splitlines()[1:]
    assert how_exact("weights") == (
        f"parameters of {len(counted)} models, built by transformers",
        f"{len(counted)} equal",
    )


def test_accuracy_page_equals_the_generated_one() -> None:
    done = subprocess.run([sys.executable, documented.ROOT / "benchmarks/accuracy_page.py", "--check"])
    assert done.returncode == 0, "python benchmarks/accuracy_page.py writes it"


def test_docstrings_have_no_sphinx_roles() -> None:
    folders = ("planner", "cache", "server", "deploy", "benchmarks", "tests/helpers")
    sources = [path for folder in folders for path in (documented.ROOT / folder).rglob("*.py")]
    assert len(sources) > 300
    assert not [path for path in sources if ROLE.search(path.read_text())]
