"""Compares a built wheel with the tree: `python tests/meta/wheel_contents.py FOLDER` (one wheel in it)."""

from __future__ import annotations

import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("dbo", "sim", "gpu", "fuzz")
SUFFIXES = (".py", ".schedule", ".typed")


def expected() -> set[str]:
    """Names that a wheel must hold: every module, schedule and `py.typed` of the four packages."""
    files = (path for package in PACKAGES for path in (ROOT / package).rglob("*"))
    return {path.relative_to(ROOT).as_posix() for path in files if path.suffix in SUFFIXES}


def problems(names: Iterable[str], wanted: set[str]) -> list[str]:
    """What is wrong with a wheel that holds `names`, one sentence each; empty: nothing."""
    payload = {name for name in names if ".dist-info/" not in name}
    metadata = {name.partition(".dist-info/")[2] for name in names if ".dist-info/" in name}
    found = [f"missing: {name}; list its package in pyproject.toml" for name in sorted(wanted - payload)]
    found += [f"unexpected: {name}; is build/ stale?" for name in sorted(payload - wanted)]
    needed = ("METADATA", "entry_points.txt", "licenses/LICENSE")
    return found + [f"missing in dist-info: {name}" for name in needed if name not in metadata]


def main(folder: str) -> int:
    """Exit code 1 when the wheel and the tree differ."""
    wheels = sorted(Path(folder).glob("*.whl"))
    if len(wheels) != 1:
        print(f"expected one wheel in the folder, found {len(wheels)}")
        return 1
    with zipfile.ZipFile(wheels[0]) as wheel:
        names = wheel.namelist()
    found = problems(names, expected())
    for problem in found:
        print(problem)
    print(f"{wheels[0].name}: {len(names)} files, {len(found)} problems")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
