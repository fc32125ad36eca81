"""docs/own-schedule.md runs as it stands: the schedule and the program are taken from the page, verbatim."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from dbo.schedule import load_schedule, validate
from sim.compiled.program import compile_schedule

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "own-schedule.md").read_text(encoding="utf-8")


def _indented(first_line: str) -> str:
    """The indented block that begins with a line."""
    start = PAGE.index("    " + first_line)
    lines = []
    for line in PAGE[start:].splitlines():
        if line and not line.startswith("    "):
            break
        lines.append(line[4:])
    return "\n".join(lines).strip() + "\n"


def _program() -> str:
    found = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert found is not None
    return found.group(1)


def _run(folder: Path, schedule: str) -> subprocess.CompletedProcess[str]:
    (folder / "own.schedule").write_text(schedule, encoding="utf-8")
    (folder / "own.py").write_text(_program(), encoding="utf-8")
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); exec(open('own.py').read())"]
    return subprocess.run([*command, "own.schedule"], cwd=folder, capture_output=True, text=True, check=False)


def test_the_example_is_about_twenty_lines() -> None:
    assert len(_program().splitlines()) <= 22


def test_the_schedule_of_the_page_is_proved(tmp_path: Path) -> None:
    done = _run(tmp_path, _indented("# late.schedule"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip().endswith("verdict: proved")
    # The order is that of the file: the shared expert right behind the send, a hand-over behind the experts.
    order = next(line for line in done.stdout.splitlines() if line.startswith("order: ")).split()[1:]
    assert order.index("S0") == order.index("D0.send") + 1
    assert order.index("MLP1") < order.index("C0.send") or order.index("MLP0") < order.index("C1.send")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("D.recv MLP |", "D.recv MPL |"), "own.schedule:5:36: unknown point"),
        (("D.send@comm S |", "D.send S |"), "the backend exchanges on the comm stream"),
        (("D.recv MLP |", "MLP D.recv |"), "a producer comes before its consumer"),
    ],
)
def test_a_broken_schedule_is_refused_in_one_sentence(tmp_path: Path, change: tuple[str, str], words: str) -> None:
    schedule = _indented("# late.schedule")
    assert change[0] in schedule
    done = _run(tmp_path, schedule.replace(*change))
    assert done.returncode == 1 and done.stderr.startswith("refused: ") and words in done.stderr, done.stderr


def test_the_schedule_of_the_page_is_compiled_too(tmp_path: Path) -> None:
    path = tmp_path / "late.schedule"
    path.write_text(_indented("# late.schedule"), encoding="utf-8")
    run = compile_schedule(load_schedule(path), backend="nccl", layers=58).replay(1024)
    assert run.races == () and run.makespan_us > 0


def test_the_list_of_operations_of_the_page_is_a_schedule(tmp_path: Path) -> None:
    path = tmp_path / "decode.ops"
    path.write_text(_indented("# decode.ops"), encoding="utf-8")
    schedule = load_schedule(path)
    assert (schedule.name, schedule.offset, schedule.yields_per_layer) == ("decode", 2, 5)
    for backend in ("nccl", "deepep_low_latency"):
        validate(schedule, backend=backend, num_ubatches=2)
