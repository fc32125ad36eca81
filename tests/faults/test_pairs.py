"""The pairs as a whole: every case has one, each uses what it says that it uses. Needs torch, as some pairs do."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest
import torch  # noqa: F401 - the modules below need it; this says so to whoever leaves such files out

from dbo.check import DETECTORS
from tests.faults.cases import CASES
from tests.faults.pair import MODEL_ONLY, Pair
from tests.meta.source_tree import ROOT

HERE = Path(__file__).parent
MODULES = sorted(path.stem for path in HERE.glob("test_*.py") if "\nPAIRS = [" in path.read_text(encoding="utf-8"))


def pairs_of(module: str) -> list[Pair]:
    return list(importlib.import_module(f"tests.faults.{module}").PAIRS)


ALL = [(module, pair) for module in MODULES for pair in pairs_of(module)]


def imported(module: str) -> set[str]:
    """Dotted names that a file of pairs imports: "module.name"."""
    tree = ast.parse((HERE / f"{module}.py").read_text(encoding="utf-8"))
    froms = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return {f"{node.module}.{alias.name}" for node in froms for alias in node.names}


def used(module: str) -> set[str]:
    """Names that a file of pairs uses outside its imports."""
    tree = ast.parse((HERE / f"{module}.py").read_text(encoding="utf-8"))
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def test_every_case_has_a_pair_and_every_pair_a_case() -> None:
    assert {pair.case for _, pair in ALL} == set(CASES)
    assert all("\n" not in title and not title.endswith(".") for title in CASES.values())


def test_names_of_pairs_differ() -> None:
    names = [str(pair) + pair.case for _, pair in ALL]
    assert len(set(names)) == len(names)


SHIPPED = [(module, pair) for module, pair in ALL if pair.uses != MODEL_ONLY]


@pytest.mark.parametrize(("module", "pair"), SHIPPED, ids=[f"{module}-{pair}" for module, pair in SHIPPED])
def test_a_pair_imports_and_uses_the_component_that_it_names(module: str, pair: Pair) -> None:
    home, _, name = pair.uses.rpartition(".")
    assert home.startswith("dbo") and hasattr(importlib.import_module(home), name)
    files = (module, "pair")  # the harness coordinates for a pair
    assert any(pair.uses in imported(file) and name in used(file) for file in files)


@pytest.mark.parametrize(("module", "pair"), ALL, ids=[f"{module}-{pair}" for module, pair in ALL])
def test_a_pair_names_a_known_class_and_a_culprit(module: str, pair: Pair) -> None:
    ids = {detector.ID for detector in DETECTORS}
    assert pair.id in ids and pair.also <= ids and pair.id not in pair.also
    assert "rank" in pair.culprit and pair.says


def test_few_cases_are_about_what_we_do_not_have() -> None:
    """A case about a part that `dbo` has uses that part."""
    assert {pair.case for _, pair in ALL if pair.uses == MODEL_ONLY} == {
        "NVIDIA/Megatron-LM#1810",
        "uccl-project/uccl#986",
        "uccl-project/uccl#993",
        "vllm-project/vllm#32860",
        "vllm-project/vllm#44185",
    }


def test_the_page_lists_every_pair() -> None:
    page = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([^`]+)` \| ([^|]+?) \| `([^`]+)` \| \[([^\]]+)\]\(([^)]+)\) \| `([^`]+)` \|", page, re.M)
    listed = {
        (case, name if name != "–" else "", id, file.removesuffix(".py"), uses)
        for case, name, id, file, _, uses in rows
    }
    assert listed == {(pair.case, pair.name, pair.id, module, pair.uses) for module, pair in ALL}
    assert all((ROOT / "docs" / link).resolve().is_file() for *_, link, _ in rows)
