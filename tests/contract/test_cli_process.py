"""The command line as a process of its own: Ctrl-C, streams that take nothing, traces that cannot be written."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dbo.cli import main
from dbo.job.types import CheckRequest
from tests.meta.source_tree import ROOT

ORDER = ("check", "--mode", "ordering", "--steps", "1")
DBO = (sys.executable, "-m", "dbo.cli")


def shell(line: str) -> subprocess.CompletedProcess[str]:
    """A line of bash in which `dbo` is the command."""
    script = f"set -o pipefail; dbo() {{ '{sys.executable}' -m dbo.cli \"$@\"; }}; {line}"
    return subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120)


def interrupted(*words: str, when: Callable[[], bool], presses: int = 1) -> subprocess.CompletedProcess[str]:
    """Run a command and press Ctrl-C, for the whole group as a terminal does, once `when` holds."""
    command = [*DBO, *words]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        give_up = time.monotonic() + 60
        while process.poll() is None and not when() and time.monotonic() < give_up:
            time.sleep(0.02)
        assert process.poll() is None, process.communicate()
        for _ in range(presses):
            os.killpg(process.pid, signal.SIGINT)
            time.sleep(0.05)
        out, err = process.communicate(timeout=60)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


@pytest.fixture
def own_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Temporary files of the commands, in the test's own folder."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


# -- Ctrl-C -----------------------------------------------------------------------------------------------------------

# A run with numbers whose threads of tasks stand inside torch when it is interrupted, and the way in around it.
STANDING = """
import threading, torch
from dbo.cli import check, script

def run(args, reached):
    reached.judges = True
    reached.stage("running")
    def stand():
        while True:
            torch.ones(300, 300) @ torch.ones(300, 300)
    for _ in range(3):
        threading.Thread(target=stand, daemon=True).start()
    print("STANDS", flush=True)
    threading.Event().wait()

check.run = run
script()
"""


def test_an_interrupt_ends_in_130_though_threads_of_tasks_are_alive(own_tmp: Path) -> None:
    pytest.importorskip("torch", reason="what stands there is torch's")
    with subprocess.Popen(
        [sys.executable, "-c", STANDING, "check"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "STANDS\n"
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "verdict: inconclusive(interrupted)\n")
    assert err == "dbo: interrupted while running, after 0 finished steps\n"


@pytest.mark.parametrize("after_s", [0.0, 3.0], ids=["while the server loads", "while ranks start or run"])
def test_an_interrupt_of_world_gpu_is_heard_by_the_launcher_alone(own_tmp: Path, after_s: float) -> None:
    pytest.importorskip("torch", reason="world gpu needs torch")
    begun: list[float] = []

    def runs() -> bool:
        if not begun and list(own_tmp.glob("dbo-run-*")):
            begun.append(time.monotonic())
        return bool(begun) and time.monotonic() >= begun[0] + after_s

    done = interrupted(
        "check",
        "--world",
        "gpu",
        "--device",
        "cpu",
        "--steps",
        "400",
        "--all2all-backend",
        "nccl",
        when=runs,
        presses=2,
    )
    assert done.returncode == 130, done.stderr
    assert len(done.stderr.splitlines()) == 1 and done.stderr.startswith("dbo: interrupted while running 2 ranks")
    assert done.stdout.splitlines()[-1] == "verdict: inconclusive(interrupted)"
    assert list(own_tmp.glob("dbo-run-*")) == []


# -- streams ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", ["", "--json", "--inject drop-wait --all2all-backend nccl"])
@pytest.mark.parametrize(("stdout", "why"), [(">/dev/full", "No space left on device"), (">&-", "it is closed")])
def test_an_answer_that_cannot_be_printed_is_told_and_is_no_verdict(
    own_tmp: Path, words: str, stdout: str, why: str
) -> None:
    done = shell(f"dbo {' '.join(ORDER)} {words} {stdout}")
    (line,) = done.stderr.splitlines()
    assert done.returncode == 74, done.stderr
    assert line.startswith(f"dbo: an answer needs a standard output that takes it: stdout={why}, verdict=")
    assert f"exit={1 if 'inject' in words else 0}; " in line


def test_what_cannot_be_told_leaves_the_exit_code(own_tmp: Path) -> None:
    assert [shell(f"dbo chekc 2>{where}").returncode for where in ("/dev/full", "&-")] == [2, 2]
    assert shell("dbo --help >/dev/full").returncode == 74
    done = shell(f"dbo {' '.join(ORDER)} 2>&-")
    assert done.returncode == 0 and "verdict: proved" in done.stdout


def test_a_reader_that_goes_early_is_met_in_silence(own_tmp: Path) -> None:
    for line in (f"dbo {' '.join(ORDER)} | head -1", "dbo --help | true"):
        done = shell(line)
        assert (done.returncode, done.stderr) == (0, ""), line


# -- traces -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("trace", "says"),
    [
        ("", "name a file"),
        ("{here}", "not a folder"),
        ("{here}/no/t.json", "create the folder"),
        ("/proc/x.json", "No such file or directory; name another file"),
        ("{here}/" + "x" * 300, "File name too long; name another file"),
    ],
)
def test_a_trace_that_can_never_be_written_is_refused_before_the_run(
    own_tmp: Path, capsys: pytest.CaptureFixture[str], trace: str, says: str
) -> None:
    assert main([*ORDER, "--trace", trace.format(here=own_tmp)]) == 2
    text = capsys.readouterr()
    assert text.out == "" and says in text.err and len(text.err.splitlines()) == 1


def test_asking_leaves_no_file_and_changes_none(own_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = own_tmp / "kept.json"
    kept.write_text("kept")
    for path in (kept, own_tmp / "new.json"):
        assert main([*ORDER, "--steps", "100000", "--trace", str(path)]) == 2  # refused by the job, later
    assert "lower --steps" in capsys.readouterr().err
    assert kept.read_text() == "kept" and not (own_tmp / "new.json").exists()


def test_a_pipe_is_no_file_to_try(own_tmp: Path) -> None:
    done = shell(f"dbo {' '.join(ORDER)} --trace >(wc -c > {own_tmp}/count; touch {own_tmp}/read)")
    assert done.returncode == 0, done.stderr
    while not (own_tmp / "read").exists():
        time.sleep(0.02)
    assert int((own_tmp / "count").read_text()) > 10_000


def test_a_trace_that_fails_while_it_is_written_keeps_the_result(capsys: pytest.CaptureFixture[str]) -> None:
    assert stat.S_ISCHR(os.stat("/dev/full").st_mode)
    assert main([*ORDER, "--trace", "/dev/full"]) == 0
    out = capsys.readouterr().out
    assert "verdict: proved" in out and "trace: not written: No space left on device\n" in out
    assert main([*ORDER, "--trace", "/dev/full", "--inject", "drop-wait", "--all2all-backend", "nccl", "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert (data["verdict"], data["trace"]) == ("violated", "not written: No space left on device")


def test_a_folder_in_place_of_the_default_trace_keeps_the_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / f"dbo-{os.getuid()}" / f"check-{CheckRequest().seed}.json").mkdir(parents=True)
    assert main([*ORDER]) == 0
    assert "trace: not written: Is a directory\n" in capsys.readouterr().out


def test_a_file_in_place_of_the_users_folder_is_refused_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / f"dbo-{os.getuid()}").write_text("in the way")
    assert main([*ORDER]) == 2
    assert "set TMPDIR to another folder" in capsys.readouterr().err


# -- what is generated ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("leftover", ["an empty folder", "a file", "a link to nothing", "a folder half tidied up"])
def test_a_leftover_of_the_generated_folder_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], leftover: str
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    mine = tmp_path / f"dbo-{os.getuid()}"
    folder = mine / "frame-v1"
    mine.mkdir()
    match leftover:
        case "an empty folder":
            folder.mkdir()
        case "a file":
            folder.write_text("in the way")
        case "a link to nothing":
            folder.symlink_to(tmp_path / "nothing")
        case _:
            folder.mkdir()
            (folder / "config.json").write_text("{}")
    assert main([*ORDER]) == 0, capsys.readouterr().err
    assert sorted(path.name for path in mine.iterdir()) == ["check-0.json", "frame-v1"]
    made = (folder / "tokenizer.json").stat()
    assert main([*ORDER]) == 0
    assert (folder / "tokenizer.json").stat() == made, "a whole one is left as it is"


def test_the_replay_line_names_the_seed_once(capsys: pytest.CaptureFixture[str], own_tmp: Path) -> None:
    assert main([*ORDER, "--seed", "3", "--trace", str(own_tmp / "t.json")]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "replay: dbo check --seed 3 --steps 1 --mode ordering"
