"""The watchdog of real processes: who is stuck, on what, in time, and nothing is left running."""

from __future__ import annotations

import multiprocessing
import time
from dataclasses import dataclass

import numpy as np
import pytest

from dbo.check import judge
from dbo.errors import DBOError, NotAvailable, PeerFailed, UBatchError, UsageError
from dbo.rank import RankMain
from gpu import board
from gpu.world import launch
from tests.gpu import jobs
from tests.gpu.jobs import STALL_S, OnRank, small_folder, small_job

WITHIN_S = 10.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return small_folder(tmp_path_factory.mktemp("model"))


def run(program, ranks=2, stall_s=STALL_S):
    """Launch; the run is over, its processes are gone, within the promised time after the last start-up."""
    before = time.monotonic()
    launched = launch(program, ranks=ranks, device="cpu", stall_s=stall_s, timeout_s=60.0)
    launched.took_s = time.monotonic() - before  # type: ignore[attr-defined]
    assert [p for p in multiprocessing.active_children() if p.name.startswith(("rank", "watchdog"))] == []
    return launched


def place(report):
    return report["rank"], report["ubatch"], report["point"]


@pytest.mark.parametrize(
    ("backend", "planted", "reason", "where"),
    [
        ("nccl", jobs.skip_an_exchange, "differing", (1, 1, "D.send")),
        ("nccl", jobs.drop_yield, "unequal-yields", (1, 0, "C.send")),
        ("nccl", jobs.killed, "died", (1, 0, "C.send")),
        ("deepep_low_latency", jobs.skip_a_call, "differing", (1, 1, "D.send")),
        ("deepep_low_latency", jobs.drop_yield, "unequal-yields", (1, 0, "C.recv")),
        ("deepep_low_latency", jobs.killed, "died", (1, 0, "C.send")),
    ],
)
def test_a_planted_fault_is_named(folder, backend, planted, reason, where):
    launched = run(RankMain(small_job(folder, backend, program_of=OnRank(1, planted))))
    assert launched.report is not None, launched.errors
    assert launched.report["reason"] == reason, launched.report["text"]
    assert place(launched.report) == where, launched.report["text"]
    assert launched.deadlocked and 0 not in launched.exit_codes
    assert all(isinstance(error, DBOError) for error in launched.errors), launched.errors
    assert launched.took_s < WITHIN_S + 20.0, "start-up, the planted step, and ten seconds"


def test_the_same_fault_on_the_other_rank_is_named_there(folder):
    launched = run(RankMain(small_job(folder, "nccl", program_of=OnRank(0, jobs.drop_yield))))
    assert launched.report is not None and place(launched.report) == (0, 0, "C.send"), launched.report


def test_a_clean_run_has_no_report(folder):
    launched = run(RankMain(small_job(folder, "nccl")))
    assert launched.report is None and not launched.deadlocked and launched.exit_codes == [0, 0]


def test_a_raising_ubatch_ends_every_rank_with_its_error(folder):
    launched = run(RankMain(small_job(folder, "nccl", program_of=OnRank(1, jobs.raises_in_ubatch_1))))
    mine, theirs = launched.errors[1], launched.errors[0]
    assert isinstance(mine, UBatchError) and mine.ubatch == 1 and "planted" in str(mine)
    assert isinstance(mine.__cause__, ValueError)
    cause = theirs.__cause__ if isinstance(theirs, UBatchError) else theirs
    assert isinstance(cause, PeerFailed) and cause.rank == 1, theirs
    assert 0 not in launched.exit_codes and not launched.deadlocked


@dataclass(frozen=True)
class Absent:
    """Rank 1 ends without coming to a collective."""

    def __call__(self, world):
        world.in_ubatch(-1, step=4)
        world.control.all_gather_object(world.rank)
        if world.rank == 0:
            world.control.all_reduce(np.zeros((1, 1), dtype=np.int32), tag=4)


@dataclass(frozen=True)
class Sleeping:
    """Rank 1 computes for ever at a point while rank 0 waits."""

    def __call__(self, world):
        world.in_ubatch(-1, step=0)
        world.control.all_gather_object(world.rank)
        if world.rank == 1:
            world.at_point("MLP", layer=2)
            time.sleep(600)
        world.control.all_gather_object(world.rank)


@dataclass(frozen=True)
class Slow:
    """Rank 1 computes longer than the watchdog's patience with a stuck run, and then comes."""

    def __call__(self, world):
        world.control.all_gather_object(world.rank)
        if world.rank == 1:
            time.sleep(5.0)
        return world.control.all_gather_object(world.rank)


def test_an_absent_rank_is_missing_in_the_report():
    launched = run(Absent())
    assert launched.report is not None and launched.report["reason"] == "stalled"
    first = launched.report["text"].splitlines()[0]
    assert first == "rank 0 main: stuck, missing rank 1"
    assert "collective all_reduce [group dp.cpu #1]" in launched.report["text"]
    assert "main of rank 1 ended and will not act" in launched.report["text"]
    found = [v for v in judge(launched.trace).violations if v.id == "deadlock"]
    assert len(found) == 1 and found[0].sentence == launched.report["text"]


def test_a_rank_that_computes_for_ever_is_named_with_its_point():
    launched = run(Sleeping(), stall_s=0.6)
    assert launched.report is not None and place(launched.report) == (1, -1, "MLP"), launched.report
    assert "rank 1 main runs (step 0 layer 2 at MLP)" in launched.report["text"]


def test_a_slow_rank_is_not_a_stuck_one():
    launched = run(Slow(), stall_s=3.0)
    assert launched.report is None and launched.values == [[0, 1], [0, 1]]


def test_what_cannot_be_run_is_refused():
    with pytest.raises(UsageError, match="top of a module"):
        launch(lambda world: None, ranks=2, device="cpu")
    with pytest.raises(UsageError, match="mode=ordering"):
        launch(Absent(), ranks=2, device="cpu", mode="ordering")
    with pytest.raises(NotAvailable, match="num_devices=.*ranks=64"):
        launch(Absent(), ranks=64, device="cuda")


def test_the_board_keeps_what_is_written(tmp_path):
    written = board.Board.create(tmp_path / "board", 2)
    part = written.rank(1)
    part.set_state(board.RUNNING, 77)
    part.write(2, (5, 3, 1, "C.send"), 4, 4, board.COLLECTIVE, "collective combine", "low_latency", 9)
    part.log("low_latency", 9, (5, 3, 1, "C.send"), "combine")
    part.find((5, 3, 1, "C.send"), "error", "first")
    part.find((5, 3, 0, "D.send"), "error", "second")
    read = board.Board.open(tmp_path / "board").rank(1)
    (line,) = read.lines()
    assert (line.name, line.step, line.layer, line.ubatch, line.point) == ("u1", 5, 3, 1, "C.send")
    assert line.waits and (line.what, line.group, line.index) == ("collective combine", "low_latency", 9)
    part.goes_on(2)
    assert not read.lines()[0].waits and (read.state, read.pid) == (board.RUNNING, 77)
    assert read.entries("low_latency")[9].tag == (5, 3, 1, "C.send")
    found = read.finding()
    assert found is not None and found.text == "first"
    for index in range(10, 10 + 2 * board.LOG_ENTRIES):
        part.log("low_latency", index, (5, 3, 1, "C.send"), "combine")
    kept = read.entries("low_latency")
    assert len(kept) == board.LOG_ENTRIES and max(kept) == 9 + 2 * board.LOG_ENTRIES
