"""What the papers point at is there: relative links, and files of the project that they name."""

import re

import pytest

from tests.meta.source_tree import ROOT

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "tests" / "README.md"])
# The changelog names what is gone.
NAMING = [page for page in PAGES if page.name != "CHANGELOG.md"]


def named(page):
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_relative_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", NAMING, ids=named)
def test_files_that_are_named_exist(page):
    text = page.read_text(encoding="utf-8")
    names = set(re.findall(r"\b(?:dbo|sim|gpu|fuzz|tests|docs)/[\w/]+\.(?:py|md|txt|schedule)\b", text))
    assert sorted(name for name in names if not (ROOT / name).exists()) == []
