"""What `dbo check` tells beside its verdict: a run that was cut, a failed step, what a good verdict does not speak of."""

from __future__ import annotations

import json
import os
import re
import tempfile
from pathlib import Path

import pytest

from dbo.cli import main
from dbo.job.rank import RankJob
from tests.contract.check_cli_harness import Dbo


def test_a_run_that_was_cut_is_no_proof(dbo: Dbo, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RankJob, "most_steps", 3)
    answer = dbo("--model", folder, "--mode", "ordering")
    assert (answer.exit, answer.data["verdict"]) == (1, "inconclusive")
    assert "requests are left after 3 steps" in answer.data["verdict_text"]


def test_files_that_are_made_by_themselves_lie_in_a_folder_of_the_user(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another user's files of the same names cannot be written."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert main(["check", "--model", str(folder), "--mode", "ordering", "--json"]) == 0
    (mine,) = tmp_path.glob("dbo-*")
    assert mine.name == f"dbo-{os.getuid()}" and mine.stat().st_mode & 0o777 == 0o700
    assert json.loads(capsys.readouterr().out)["trace"] == str(mine / "check-0.json")


def test_a_failed_step_is_in_the_table(dbo: Dbo, folder: Path) -> None:
    answer = dbo("--model", folder, "--mode", "ordering", "--inject", "raise")
    failed = [step for step in answer.data["steps"] if step["phase"] == "failed"]
    assert [step["step"] for step in failed] == [answer.data["violations"][0]["step"]]
    assert failed[0]["why"].startswith("UBatchError; ")
    steps = [step["step"] for step in answer.data["steps"]]
    assert steps == sorted(set(steps))
    text = dbo("--model", folder, "--mode", "ordering", "--inject", "raise", json=False).out
    assert re.search(r"^0 +failed +.*scheduled again$", text, re.MULTILINE), text


def test_a_good_verdict_says_what_it_does_not_speak_of(dbo: Dbo, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("hi\n")
    answer = dbo("--model", folder, "--mode", "ordering", "--prompts", tmp_path / "short.txt")
    assert answer.exit == 0 and any("no step was split" in warning for warning in answer.data["warnings"])
    (tmp_path / "serial.txt").write_text(
        "schedule serial\nbackends nccl\nlayer A0 A1 D.send@comm D.recv | MLP C.send@comm C.recv S |\n"
    )
    words = ("--all2all-backend", "nccl", "--dbo-schedule", tmp_path / "serial.txt")
    answer = dbo("--model", folder, "--mode", "ordering", *words)
    assert answer.data["overlap"]["ideal_share"] == 0.0
    assert any("hides nothing" in warning for warning in answer.data["warnings"])
    assert dbo("--model", folder, "--mode", "ordering").data["warnings"] == []
