"""Every detector is listed, has its sentence and its place among causes, and somebody tests it."""

import importlib
import re

from dbo.check import DETECTORS
from dbo.check.causes import CAUSES
from tests.meta.source_tree import ROOT, suites


def detector_modules():
    """Modules of dbo/check that look like a detector: they define an ID and a `detect`."""
    names = [path.stem for path in sorted((ROOT / "dbo" / "check").glob("*.py")) if path.stem != "__init__"]
    modules = [importlib.import_module(f"dbo.check.{name}") for name in names]
    return [module for module in modules if hasattr(module, "ID") and hasattr(module, "detect")]


def test_every_detector_is_listed_once():
    assert sorted(module.__name__ for module in DETECTORS) == sorted(module.__name__ for module in detector_modules())


def test_ids_are_those_of_the_files_and_differ():
    ids = [module.ID for module in DETECTORS]
    assert ids == [module.__name__.rpartition(".")[2].replace("_", "-") for module in DETECTORS]
    assert len(set(ids)) == len(ids)


def test_each_has_one_sentence_and_a_place_among_causes():
    causes = [id for id, _ in CAUSES]
    for module in DETECTORS:
        assert re.fullmatch(r"[a-z].{10,200}[^.]", module.SENTENCE), module.ID
        assert module.ID in causes


def test_each_is_named_in_a_test():
    texts = [path.read_text(encoding="utf-8") for path in suites() if path.name != "test_detectors.py"]
    unnamed = [m.ID for m in DETECTORS if not any(m.ID in text for text in texts)]
    assert unnamed == []
