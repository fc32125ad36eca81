"""The house rules that a reader would otherwise have to check by hand."""

import re
import statistics

import pytest

from tests.meta.source_tree import ROOT, modules, tracked_files

MAX_LINES = 500
MAX_MEDIAN_LINES = 120
# A developer's or a CI machine's places: nothing in the project may depend on them. Spelt apart for this file's sake.
MACHINE_PATHS = re.compile(r"(?<![\w.])/(?:" + "|".join(("work", "root", "farm", "home", "opt/venv")) + r")/[\w.-]+")
REGISTRY_HOSTS = re.compile(
    "|".join(("pypi" + r"\.org", "pythonhosted" + r"\.org", "npm" + r"js\.", "deb" + r"\.debian"))
)


def test_no_module_is_too_long():
    lengths = {str(path.relative_to(ROOT)): _lines(path) for path in modules()}
    assert {name: count for name, count in lengths.items() if count > MAX_LINES} == {}


def test_the_median_module_is_short():
    assert statistics.median(_lines(path) for path in modules()) <= MAX_MEDIAN_LINES


@pytest.mark.parametrize("pattern", [MACHINE_PATHS, REGISTRY_HOSTS], ids=["machine paths", "registry hosts"])
def test_tracked_files_name_no(pattern):
    found = []
    for path in tracked_files():
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
            if pattern.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}")
    assert found == []


@pytest.mark.parametrize(
    "line", ["open('/wo" + "rk/main/x')", "see /ro" + "ot/.cache", "index: https://py" + "pi.org/simple"]
)
def test_the_patterns_see_what_they_are_for(line):
    assert MACHINE_PATHS.search(line) or REGISTRY_HOSTS.search(line)


def _lines(path):
    return len(path.read_text(encoding="utf-8").splitlines())
