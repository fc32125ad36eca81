"""Who writes and who reads each kind of record, by the source: `dbo.trace.kinds` is the contract between them."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType

from dbo.trace import kinds
from dbo.trace.kind import Kind
from tests.meta.source_tree import ROOT, modules, parse

# Calls that write a record, and the argument that names its kind; any call may name it by the keyword `kind`.
WRITING_CALLS = {
    "host": 0,
    "host_record": 1,
    "on_line": 0,
    "launch": 0,
    "device": 0,
    "timed_device": 0,
    "_device": 0,
    "_tell": 0,
    "Record": 3,
}
CONTRACT = (ROOT / "dbo" / "trace" / "kinds.py", ROOT / "dbo" / "trace" / "kind.py")


def names() -> dict[str, Kind]:
    """Every kind by the name of its constant."""
    return {name: value for name, value in vars(kinds).items() if isinstance(value, Kind)}


@cache
def uses() -> tuple[Mapping[str, set[str]], Mapping[str, set[str]]]:
    """(writers, readers): by kind, the files that write it, and those that look for it."""
    writers: dict[str, set[str]] = defaultdict(set)
    readers: dict[str, set[str]] = defaultdict(set)
    for path in modules():
        if path in CONTRACT:
            continue
        written = {id(node) for node in _written(parse(path))}
        declared = {id(node) for node in _declared(parse(path))}
        for node in ast.walk(parse(path)):
            name = _kind_name(node)
            if name is not None and id(node) not in declared:
                (writers if id(node) in written else readers)[str(names()[name])].add(_relative(path))
    return writers, readers


def _written(tree: ast.Module) -> Iterator[ast.AST]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            at = WRITING_CALLS.get(called)
            if at is not None and len(node.args) > at:
                yield from ast.walk(node.args[at])
            for keyword in node.keywords:
                if keyword.arg == "kind":
                    yield from ast.walk(keyword.value)


def _declared(tree: ast.Module) -> Iterator[ast.AST]:
    """What READS and NEEDS say: a declaration is no reader."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") in ("READS", "NEEDS"):
            yield from ast.walk(node.value)


def _kind_name(node: ast.AST) -> str | None:
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "kinds":
        return node.attr if node.attr in names() else None
    return None


def _relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def looked_for(path: Path) -> set[str]:
    """Kinds that a module's code names, its declarations apart."""
    declared = {id(node) for node in _declared(parse(path))}
    found = (_kind_name(node) for node in ast.walk(parse(path)) if id(node) not in declared)
    return {str(names()[name]) for name in found if name is not None}


def broken_promises(contract: Iterable[Kind], detectors: Iterable[ModuleType]) -> list[str]:
    """A sentence for each kind that nobody writes or reads, and for each detector that reads what nobody writes."""
    writers, readers = uses()
    told = [f"{kind}: no world writes it" for kind in contract if not writers.get(kind)]
    told += [f"{kind}: nobody reads it" for kind in contract if not readers.get(kind)]
    for detector in detectors:
        for kind in (*detector.READS, *detector.NEEDS):
            if not writers.get(kind):
                told.append(f"detector {detector.ID} reads {kind}, which no world writes")
    return told
