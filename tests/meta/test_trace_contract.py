"""The contract of the trace holds on both sides: every kind has a writer and a reader, detectors say what they read."""

from types import SimpleNamespace

import pytest

from dbo.check import DETECTORS
from dbo.trace import kinds
from dbo.trace.kind import Kind, attr
from tests.meta.source_tree import ROOT
from tests.meta.trace_contract import broken_promises, looked_for, names, uses

CHECKS = sorted((ROOT / "dbo" / "check").glob("*.py"))
GHOST = Kind("ghost", on="host", when="never")


def test_every_kind_has_a_writer_and_a_reader():
    assert broken_promises(kinds.KINDS.values(), DETECTORS) == []
    assert len(kinds.KINDS) == len(names()) > 30


def test_a_kind_that_nobody_writes_is_named():
    assert broken_promises([GHOST], []) == ["ghost: no world writes it", "ghost: nobody reads it"]


def test_a_detector_of_a_kind_that_nobody_writes_is_named():
    detector = SimpleNamespace(ID="haunted", READS=(GHOST,), NEEDS=())
    assert broken_promises([], [detector]) == ["detector haunted reads ghost, which no world writes"]


@pytest.mark.parametrize("detector", DETECTORS, ids=lambda detector: detector.ID)
def test_a_detector_declares_what_its_module_looks_for(detector):
    found = looked_for(ROOT / f"{detector.__name__.replace('.', '/')}.py")
    assert found <= set(detector.READS)
    assert set(detector.NEEDS) <= set(kinds.KINDS)


def test_kinds_are_named_by_their_constants():
    """A literal would be neither writer nor reader to the tests above."""
    literal = {str(path.relative_to(ROOT)) for path in CHECKS if 'of_kind("' in path.read_text(encoding="utf-8")}
    assert literal == set()


def test_writers_are_worlds_or_what_runs_in_them():
    writers, _ = uses()
    assert any(file.startswith("sim/") for file in writers["wait"]) and any(
        file.startswith("gpu/") for file in writers["wait"]
    )
    assert "dbo/ubatching/ring.py" in writers["yield"]


def test_a_kind_says_what_is_wrong_with_a_record():
    kind = Kind("k", on="host", when="in this test", attrs={"size": attr(int, "bytes")})
    assert kind.faults_of({"size": 3}) == []
    assert kind.faults_of({}) == ["lacks size"]
    assert kind.faults_of({"size": "3"}) == ["carries size='3', which is no int"]
    assert kind.faults_of({"size": 3, "more": 1}) == ["carries more, which the contract does not name"]
