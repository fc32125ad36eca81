"""Every world and detector keeps its typed contract, and mypy names what does not. Needs mypy."""

import importlib.util
import re
import shutil
import subprocess
import sys

import pytest

from tests.meta.source_tree import ROOT

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("mypy") is None,
    reason="mypy is not installed (extra dev); the tox environment type runs it",
)


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A copy of the product with mypy's cache warm: each change then costs what depends on it."""
    folder = tmp_path_factory.mktemp("tree")
    for package in ("dbo", "sim", "gpu", "fuzz"):
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    assert errors(folder) == []
    return folder


def errors(folder):
    """mypy's error lines over the modules that hold the contracts."""
    command = [sys.executable, "-m", "mypy", "-p", "sim._conforms", "-p", "gpu._conforms", "-p", "dbo.check._conforms"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if ": error:" in line or ": note:" in line]


@pytest.mark.parametrize(
    ("file", "old", "new", "named"),
    [
        ("sim/world.py", r"self\.comm = SimStream", "self.comm_stream = SimStream", "comm"),
        (
            "sim/world.py",
            r"    def in_ubatch\(self, ubatch: int, ",
            "    def in_ubatch(self, ubatch: str, ",
            "in_ubatch",
        ),
        ("gpu/device.py", r"    def new_graph\(", "    def make_graph(", "new_graph"),
        ("dbo/check/numeric.py", r"^UNIT = .*$", "", "UNIT"),
    ],
    ids=["an attribute gone", "another type", "a method gone", "a detector without its unit"],
)
def test_mypy_names_what_a_world_lacks(copy, file, old, new, named):
    path = copy / file
    text = path.read_text(encoding="utf-8")
    changed = re.sub(old, new, text, count=1, flags=re.MULTILINE)
    assert changed != text
    path.write_text(changed, encoding="utf-8")
    try:
        found = errors(copy)
    finally:
        path.write_text(text, encoding="utf-8")
    assert any("_conforms.py" in line and named in line for line in found), found
