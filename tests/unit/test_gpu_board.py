"""The board of runs with DCP groups: who meets whom, who is missing, who came with something else in mind."""

from __future__ import annotations

import os

import pytest

from gpu.watch import flight_recorder as board
from gpu.watch.stuck import differing_exchange, waiters_of

TAGS = (3, 1, -1, "A1")


@pytest.fixture
def watched(tmp_path):
    """Four living ranks in two groups; all have come to exchange 0 of theirs."""
    made = board.Board.create(tmp_path / "board", 4)
    for rank in range(4):
        part = made.rank(rank)
        part.set_state(board.RUNNING, os.getpid())
        part.joins_dcp((0, 1) if rank < 2 else (2, 3))
        part.write(0, TAGS, 0, 0)
        part.log(f"dcp{rank // 2}", 0, TAGS, "all_reduce")
    return made


def waits(watched, rank, index):
    watched.rank(rank).write(
        0,
        TAGS,
        0,
        0,
        board.LineWait(state=board.COLLECTIVE, what="collective all_reduce", group=f"dcp{rank // 2}", index=index),
    )


def test_who_meets_whom(watched):
    assert watched.circles("dcp") == [(0, 1), (2, 3)] and watched.circles("ep") == [(0, 1, 2, 3)]
    assert board.Board.create(watched.path.with_name("other"), 2).circles("dcp") == []


def test_only_ranks_of_the_group_are_missing(watched):
    watched.rank(3).log("dcp1", 1, TAGS, "all_reduce")
    waits(watched, 3, 1)
    (waiter,), _ = waiters_of(watched)
    assert (waiter.rank, waiter.group, waiter.missing) == (3, "dcp", (2,))


def test_a_rank_that_waits_for_its_device_waits_for_its_group(watched):
    watched.rank(0).log("dcp0", 1, TAGS, "all_reduce")
    watched.rank(0).write(0, TAGS, 0, 0, board.LineWait(state=board.DEVICE, what="compute: sample"))
    (waiter,), _ = waiters_of(watched)
    assert (waiter.group, waiter.index, waiter.missing) == ("dcp", 1, (1,))


def test_groups_do_different_things_and_ranks_of_one_do_not(watched):
    for rank in range(4):
        watched.rank(rank).log(f"dcp{rank // 2}", 1, TAGS, "all_reduce" if rank < 2 else "dcp.direct")
    agreed = {}
    assert differing_exchange(watched, agreed) is None
    assert agreed["dcp/0"] == agreed["dcp/2"] == 2
    watched.rank(1).log("dcp0", 2, TAGS, "all_gather")
    watched.rank(0).log("dcp0", 2, TAGS, "all_reduce")
    found = differing_exchange(watched, agreed)
    assert found is not None and found.text.startswith("group dcp #2: rank 0 at A1") and "rank 2" not in found.text


@pytest.mark.parametrize("index", [2**31, 2**40])
def test_numbers_of_exchanges_outlast_a_day(watched, index):
    watched.rank(0).log("dcp0", index, TAGS, "all_reduce")
    waits(watched, 0, index)
    (line,) = [line for line in watched.rank(0).lines() if line.name == "main"]
    assert line.index == index and line.waits
    assert watched.rank(0).entries("dcp")[index].op == "all_reduce"
