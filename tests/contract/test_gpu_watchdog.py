"""The watchdog of real processes: who is stuck, on what, in time, and nothing is left running."""

from __future__ import annotations

import multiprocessing
import os
import time
from dataclasses import dataclass

import numpy as np
import pytest
import torch.distributed as dist

from dbo.check import judge
from dbo.contract.patience import Patience
from dbo.errors import DBOError, NotAvailable, PeerFailed, UBatchError, UsageError
from dbo.job.rank import RankMain
from gpu.check import planted_faults
from gpu.check.planted_faults import OnRank
from gpu.watch import flight_recorder as board
from gpu.watch import watchdog
from gpu.watch.stuck import differing_exchange
from gpu.world import launch
from tests.gpu import jobs
from tests.gpu.jobs import STALL_S, small_folder, small_job

WITHIN_S = 10.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return small_folder(tmp_path_factory.mktemp("model"))


def run(program, ranks=2, stall_s=STALL_S, slow_s=None):
    """Launch; the run is over, its processes are gone, within the promised time after the last start-up."""
    before = time.monotonic()
    launched = launch(
        program, ranks=ranks, device="cpu", patience=Patience(stall_s=stall_s, slow_s=slow_s), timeout_s=60.0
    )
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


def test_a_run_whose_time_is_up_ends_then_and_says_so():
    before = time.monotonic()
    launched = launch(Sleeping(), ranks=2, device="cpu", patience=Patience(stall_s=60.0), timeout_s=4.0)
    assert time.monotonic() - before < 9.0, "nobody is waited for any longer"
    assert launched.report is None and launched.exit_codes == [-9, -9]
    assert all("ran out of time" in str(error) for error in launched.errors)


def test_a_slow_rank_is_not_a_stuck_one():
    launched = run(Slow(), stall_s=3.0)
    assert launched.report is None and launched.values == [[0, 1], [0, 1]]


@dataclass(frozen=True)
class SettingUp:
    """The library takes longer for its first exchange than the watchdog's patience with lines that wait."""

    def __call__(self, world):
        plain = dist.all_gather_object

        def slow(*args, **options):
            time.sleep(2.0)
            return plain(*args, **options)

        dist.all_gather_object = slow
        return world.control.all_gather_object(world.rank)


@dataclass(frozen=True)
class StartsLate:
    """Rank 1 says nothing on the board for longer than that."""

    def __call__(self, world):
        if world.rank == 1:
            time.sleep(2.0)
        return world.control.all_gather_object(world.rank)


@pytest.mark.parametrize("program", [SettingUp(), StartsLate()])
def test_who_sets_up_is_not_stuck(program):
    launched = run(program, stall_s=0.5, slow_s=30.0)
    assert launched.report is None and launched.values == [[0, 1], [0, 1]], launched.report


def test_a_library_that_never_ends_is_told_in_the_end():
    launched = run(SettingUp(), stall_s=0.2, slow_s=0.6)
    assert launched.report is not None and launched.report["reason"] == "stalled"
    assert "rank 0 dp.cpu runs" in launched.report["text"]


@pytest.fixture
def watched(tmp_path):
    """A board of two ranks that live, both in a step."""
    written = board.Board.create(tmp_path / "board", 2)
    for _, part in written.parts():
        part.set_state(board.RUNNING, os.getpid())
        part.write(0, (3, -1, -1, ""), 0, 0)
    return written


def comes(watched, rank, index, point="D.send", *, waits=True, group="ep"):
    """Ubatch 0 of a rank comes to an exchange, and waits in it."""
    part, tags = watched.rank(rank), (3, 1, 0, point)
    part.log(group, index, tags, "all_to_all_single")
    state = board.COLLECTIVE if waits else board.BUSY
    part.write(
        1, tags, 0, 0, board.LineWait(state=state, what="collective all_to_all_single", group=group, index=index)
    )


def stalled(watched, still_s):
    return watchdog._stalled(watched, still_s, 1.0, 60.0)


def test_an_exchange_that_all_have_come_to_is_under_way(watched):
    comes(watched, 0, 7)
    comes(watched, 1, 7)
    assert stalled(watched, 59.0) is None, "its first call may set up a communicator, or compile"
    late = stalled(watched, 61.0)
    assert late is not None and late.text.startswith("rank 0 ep runs")


def test_a_peer_that_computes_is_waited_for(watched):
    comes(watched, 0, 7)
    watched.rank(1).write(1, (3, 1, 0, "A1"), 0, 0)
    assert stalled(watched, 59.0) is None
    late = stalled(watched, 61.0)
    assert late is not None and (late.rank, late.ubatch, late.point) == (1, 0, "A1")


def test_a_device_is_waited_for_while_a_peer_still_launches(watched):
    for rank in range(2):
        comes(watched, rank, 7, waits=rank == 1)
    watched.rank(0).write(0, (3, -1, -1, "sample"), 0, 0, board.LineWait(state=board.DEVICE, what="compute: sample"))
    watched.rank(0).set_line_state(1, board.IDLE)
    assert stalled(watched, 59.0) is None, "rank 1 has announced the exchange and may be compiling its kernel"
    watched.rank(1).write(0, (3, -1, -1, "sample"), 0, 0, board.LineWait(state=board.DEVICE, what="compute: sample"))
    watched.rank(1).set_line_state(1, board.IDLE)
    found = stalled(watched, 1.1)
    assert found is not None and found.point == "sample", "all hosts wait: nobody launches any more"


def test_lines_that_wait_for_each_other_are_stuck(watched):
    comes(watched, 0, 7)
    for line in (1, 2):
        watched.rank(1).write(line, (3, 1, line - 1, "A1"), 2, 2, board.LineWait(state=board.BATON))
    watched.rank(1).set_line_state(0, board.JOIN)
    assert stalled(watched, 0.9) is None
    found = stalled(watched, 1.1)
    assert found is not None and (found.rank, found.ubatch, found.point) == (1, 0, "A1")
    assert found.text.startswith("rank 1 u0, rank 1 u1: stuck, each waits for another of them")


def test_exchanges_that_were_looked_at_are_not_looked_at_again(watched):
    agreed: dict[str, int] = {}
    for index in range(3):
        comes(watched, 0, index)
        comes(watched, 1, index)
    comes(watched, 0, 3)
    assert differing_exchange(watched, agreed) is None and list(agreed.values()) == [3]
    comes(watched, 1, 3, "C.send")
    found = differing_exchange(watched, agreed)
    assert found is not None and found.text.startswith("group ep #3") and list(agreed.values()) == [3]


def test_the_board_keeps_the_first_time_of_what_happens(watched):
    before = time.monotonic()
    watched.rank(0).mark("planted")
    first = watched.rank(0).marks()
    watched.rank(0).mark("planted")
    assert before <= first["planted"] <= time.monotonic() and watched.rank(0).marks() == first
    assert watched.rank(1).marks() == {}


def test_a_run_says_when_it_came_how_far(folder):
    launched = run(
        RankMain(small_job(folder, "nccl", program_of=planted_faults.OnRank(1, planted_faults.die_computing)))
    )
    assert launched.report is not None and place(launched.report) == (1, 1, "MLP"), launched.report
    marks = launched.marks[1]
    assert 0 < marks["started"] <= marks["connected"] <= marks["stepping"] <= marks["planted"] <= launched.reported_s
    assert "planted" not in launched.marks[0] and len(launched.processes) == 3
    assert not any(map(board.is_alive, launched.processes))


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
    part.write(
        2,
        (5, 3, 1, "C.send"),
        4,
        4,
        board.LineWait(state=board.COLLECTIVE, what="collective combine", group="low_latency", index=9),
    )
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
