"""Fixtures of the tests of `dbo check` in process."""

from __future__ import annotations

from pathlib import Path

import pytest

from dbo.cli import main
from tests.contract.check_cli_harness import Answer, Dbo, write_folder


@pytest.fixture
def dbo(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Dbo:
    """Run `dbo check --json` in process; its trace goes to the test's own folder."""

    def run(*arguments: object, json: bool = True) -> Answer:
        words = ["check", *map(str, arguments), "--trace", str(tmp_path / "trace.json")]
        code = main([*words, "--json"] if json else words)
        captured = capsys.readouterr()
        return Answer(code, captured.out, captured.err)

    return run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder without weights."""
    return write_folder(tmp_path_factory.mktemp("model"))
