"""The list of packages in pyproject.toml is the tree's, and the check of the built wheel can fail."""

import tomllib

from tests.meta.source_tree import ROOT, packages
from tests.meta.wheel_contents import expected, problems

INFO = "dual_batch_overlap-0.dist-info"
GOOD_METADATA = [f"{INFO}/METADATA", f"{INFO}/entry_points.txt", f"{INFO}/licenses/LICENSE"]


def test_every_package_is_listed_and_nothing_else():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert sorted(settings["tool"]["setuptools"]["packages"]) == packages()


def test_a_wheel_that_holds_the_tree_has_no_problem():
    assert problems([*expected(), *GOOD_METADATA], expected()) == []


def test_a_missing_module_a_stray_file_and_a_missing_license_are_named():
    names = [*(expected() - {"dbo/errors.py"}), "tests/conftest.py", *GOOD_METADATA[:2]]
    found = problems(names, expected())
    assert [problem.partition(";")[0] for problem in found] == [
        "missing: dbo/errors.py",
        "unexpected: tests/conftest.py",
        "missing in dist-info: licenses/LICENSE",
    ]
