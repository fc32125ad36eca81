"""What the papers point at is there: relative links, and what they name of the project, be it a path or a dotted name."""

import ast
import re

import pytest

from tests.meta.source_tree import ROOT, parse

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "tests" / "README.md"])
# The changelog names what is gone.
NAMING = [page for page in PAGES if page.name != "CHANGELOG.md"]


def named(page):
    return str(page.relative_to(ROOT))


def missing_links(page):
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    return [link for link in links if not (page.parent / link).exists()]


def missing_paths(text):
    files = re.findall(r"\b(?:dbo|sim|gpu|fuzz|tests|docs)/[\w/]+\.(?:py|md|txt|schedule)\b", text)
    folders = re.findall(r"`((?:dbo|sim|gpu|fuzz|tests|docs)/[\w/]+)`", text)
    return sorted({name for name in (*files, *folders) if not (ROOT / name).exists()})


def missing_names(text):
    dotted = re.findall(r"(?<![\w./])(?:dbo|sim|gpu|fuzz)(?:\.[A-Za-z_]\w*)+(?![\w/])", text)
    return sorted({name for name in dotted if not exists(name)})


def exists(dotted):
    """Whether a module of that name exists, or one above it has the next part at its top level."""
    parts = dotted.split(".")
    for end in range(len(parts), 0, -1):
        base = ROOT.joinpath(*parts[:end])
        for file in (base.with_suffix(".py"), base / "__init__.py"):
            if file.is_file():
                return end == len(parts) or parts[end] in top_level(file)
        if base.is_dir():
            return end == len(parts)
    return False


def top_level(file):
    names = set()
    for node in ast.walk(parse(file)):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.Assign(targets=targets):
                names |= {target.id for target in targets if isinstance(target, ast.Name)}
            case ast.AnnAssign(target=ast.Name(id=name)):
                names.add(name)
            case ast.ImportFrom(names=aliases):
                names |= {alias.asname or alias.name for alias in aliases}
    return names


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_relative_links_lead_somewhere(page):
    assert missing_links(page) == []


@pytest.mark.parametrize("page", NAMING, ids=named)
def test_what_is_named_exists(page):
    text = page.read_text(encoding="utf-8")
    assert missing_paths(text) + missing_names(text) == []


def test_where_modules_moved_to_is_there():
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    moved = re.findall(r"^\| `[\w.]+` \| (.+) \|$", changelog, flags=re.MULTILINE)
    assert moved
    assert missing_names("\n".join(moved)) == []


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("see `dbo.job_inputs`", ["dbo.job_inputs"]),
        ("see `dbo.job.inputs.no_such_name`", ["dbo.job.inputs.no_such_name"]),
        ("`dbo.job.inputs`, dbo.errors.refusal and sim.bench.", []),
    ],
)
def test_a_stale_name_is_seen(text, missing):
    assert missing_names(text) == missing


def test_a_stale_path_is_seen():
    assert missing_paths("`dbo/moe`, dbo/job_inputs.py, `sim/no_such_room`") == [
        "dbo/job_inputs.py",
        "sim/no_such_room",
    ]


def test_a_broken_link_is_seen(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("[one](page.md), [two](gone.md#part), [three](https://example.org)", encoding="utf-8")
    assert missing_links(page) == ["gone.md"]
