"""Kernels that hold SMs until their peers run, launched in opposite orders."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from dbo.check import judge
from dbo.trace import Trace
from sim.collectives import SimGroup
from sim.engine import SMS_PER_DEVICE
from sim.work import Work
from sim.world import SimWorld
from tests.faults.pair import MODEL_ONLY, Pair, check_pair, run

LOW_LATENCY_SMS = 120


def exchanged(orders: Sequence[str], weights_sms: int = 32) -> Trace:
    """Background weight exchange N on comm, low-latency kernel L on compute, launched in each rank's order."""

    def program(world: SimWorld) -> None:
        kernels = {
            "N": (SimGroup(world, "weights"), world.comm, weights_sms),
            "L": (SimGroup(world, "low latency"), world.compute, LOW_LATENCY_SMS),
        }
        for name in orders[world.rank]:
            group, stream, sms = kernels[name]
            world.set_stream(stream)
            group.exchange(
                Work(kind="exchange", name=name, duration_us=5.0, takes_sms=sms),
                signature=([1], "uint8"),
                value=None,
                connect=lambda members, rank: (lambda: None, lambda: None),
            )
        for stream in (world.comm, world.compute):
            stream.synchronize()

    return run(program, ranks=2)


PAIRS = [
    Pair(
        case="vllm-project/vllm#32860",
        id="slot-cycle",
        uses=MODEL_ONLY,
        buggy=lambda: exchanged(["NL", "LN"]),
        fixed=lambda: exchanged(["NL", "NL"]),
        culprit={"rank": 1},
        also=frozenset({"deadlock"}),
        says=(
            "resource cycle over 132 SMs",
            "rank 0 launches N (32 SMs) before L (120)",
            "rank 1 launches L (120) before N (32)",
        ),
    ),
    Pair(
        case="vllm-project/vllm#32860",
        name="fits",
        id="slot-cycle",
        uses=MODEL_ONLY,
        buggy=lambda: exchanged(["NL", "LN"], 14),
        fixed=lambda: exchanged(["NL", "LN"], 12),
        culprit={"rank": 1},
        says=("N (14)",),
        also=frozenset({"deadlock"}),
    ),
]


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_pair(pair: Pair) -> None:
    check_pair(pair)


def test_the_hang_names_who_holds_the_sms() -> None:
    report = judge(exchanged(["NL", "LN"]))
    (deadlock,) = (v for v in report.violations if v.id == "deadlock")
    assert "waits for 120 SMs for L, 100 are free" in deadlock.sentence
    assert "waits for 32 SMs for N, 12 are free" in deadlock.sentence


def test_in_equal_order_the_second_kernel_waits_for_the_first_ones_sms() -> None:
    trace = exchanged(["NL", "NL"])
    ends = {r.rank: r.end_us for r in trace.of_kind("exchange") if r.name == "N"}
    starts = {r.rank: r.t_us for r in trace.of_kind("collective") if r.name == "L"}
    assert all(starts[rank] >= ends[rank] for rank in (0, 1))
    assert SMS_PER_DEVICE - 32 < LOW_LATENCY_SMS
