"""Open a folder and know what lies in it: each package's docstring names its modules, and only such as exist."""

import ast
import re

import pytest

from tests.meta.source_tree import PACKAGES, ROOT, parse

FOLDERS = sorted({path.parent for package in PACKAGES for path in (ROOT / package).rglob("*.py")})
MOST_LINES = 60


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: str(folder.relative_to(ROOT)))
def test_a_package_says_what_lies_in_it(folder):
    text = ast.get_docstring(parse(folder / "__init__.py")) or ""
    modules = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    unnamed = sorted(name for name in modules if not re.search(rf"^{name}  |`{name}`", text, flags=re.MULTILINE))
    assert unnamed == []
    listed = re.findall(r"^(\w+)  +\S", text, flags=re.MULTILINE)
    rooms = {path.name for path in folder.iterdir() if path.is_dir()}
    assert sorted(set(listed) - modules - rooms - {"bench_"}) == []
    assert text.count("\n") < MOST_LINES
