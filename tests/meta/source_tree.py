"""What the tree says about itself: tracked files, modules, and what a module imports when it is imported."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("dbo", "sim", "gpu", "fuzz")


def modules() -> list[Path]:
    """Every module of the distribution."""
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def packages() -> list[str]:
    """Dotted names of every package on disk: folders with Python files or package data in them."""
    found = set()
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*"):
            if path.suffix in (".py", ".schedule"):
                found.add(".".join(path.parent.relative_to(ROOT).parts))
    return sorted(found)


def suites() -> list[Path]:
    """Every file of tests."""
    return sorted((ROOT / "tests").rglob("test_*.py"))


def tracked_files() -> list[Path]:
    """Files that git tracks, or would track."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [path for name in listed.split("\0") if name and (path := ROOT / name).is_file()]


@cache
def parse(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


@cache
def imports_at_import_time(path: Path) -> frozenset[str]:
    """Dotted names that are imported when `path` is: neither inside functions nor for type checkers only."""
    return frozenset(_imports(parse(path).body))


def _imports(body: list[ast.stmt]) -> Iterator[str]:
    for node in body:
        match node:
            case ast.Import():
                yield from (alias.name for alias in node.names)
            case ast.ImportFrom(level=0):
                yield node.module or ""
                yield from (f"{node.module}.{alias.name}" for alias in node.names)
            case ast.If():
                if "TYPE_CHECKING" not in ast.unparse(node.test):
                    yield from _imports(node.body)
                yield from _imports(node.orelse)
            case ast.Try():
                yield from _imports([*node.body, *node.orelse, *node.finalbody])
            case ast.With() | ast.ClassDef():
                yield from _imports(node.body)


@cache
def needs(path: Path, library: str) -> bool:
    """Whether importing `path` imports `library`, directly or through modules of this project."""
    waiting, seen = [path], {path}
    while waiting:
        names = imports_at_import_time(waiting.pop())
        if any(name.partition(".")[0] == library for name in names):
            return True
        reached = {file for name in names for file in _files_of(name)} - seen
        waiting += reached
        seen |= reached
    return False


def _files_of(dotted: str) -> Iterator[Path]:
    """The files that run when `dotted` is imported: its module and every package above it."""
    parts = dotted.split(".")
    if parts[0] not in (*PACKAGES, "tests"):
        return
    for end in range(1, len(parts) + 1):
        base = ROOT.joinpath(*parts[:end])
        for candidate in (base.with_suffix(".py"), base / "__init__.py"):
            if candidate.is_file():
                yield candidate
