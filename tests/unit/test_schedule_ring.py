"""The order that a schedule gives is played, not listed: golden orders, turns, offsets, more than two ubatches."""

import pytest

from dbo.errors import ScheduleError
from dbo.schedule import (
    LayerProgram,
    Point,
    RunRecvHook,
    Schedule,
    Yield,
    load_schedule,
    order_line,
    parse_schedule,
    ring_order,
)
from dbo.schedule.ring import run_ring, steady_window

SEED_ORDER = (
    "D₁ send, A0₀, A1₀, D₁ recv, D₀ send, MLP₁, D₀ recv, C₁ send, S₁, MLP₀, C₁ recv, C₀ send, S₀, A0₁, A1₁, C₀ recv"
)

# (preset, backend) -> one period of the ring.
GOLDEN = {
    ("mlp_shared_overlap", "deepep_low_latency"): (
        "D0.send A0_1 A1_1 D0.recv D1.send MLP0 D1.recv C0.send S0 MLP1 C0.recv C1.send S1 A0_0 A1_0 C1.recv"
    ),
    ("mlp_shared_overlap", "nccl"): (
        "D0.send C1.recv A0_1 A1_1 D1.send D0.recv MLP0 C0.send S0 D1.recv MLP1 C1.send S1 C0.recv A0_0 A1_0"
    ),
    ("vllm_high_throughput", "deepep_high_throughput"): (
        "D0.send D0.recv MLP0 D1.send D1.recv MLP1 C0.send S0 C0.recv copy0 C1.send S1 C1.recv copy1 "
        "A0_0 A1_0 A0_1 A1_1"
    ),
    ("sglang_prefill", "deepep_high_throughput"): (
        "D0.send S1 C1.recv A0_1 A1_1 D1.send D0.recv MLP0 C0.send D1.recv MLP1 C1.send S0 C0.recv A0_0 A1_0"
    ),
    ("sglang_decode", "deepep_low_latency"): (
        "D0.send S0 A0_1 D0.recv MLP0 C0.send A1_1 C0.recv D1.send S1 A0_0 D1.recv MLP1 C1.send A1_0 C1.recv"
    ),
    ("sglang_decode", "nccl"): (
        "D0.send S0 A0_1 D0.recv MLP0 C0.send A1_1 C0.recv D1.send S1 A0_0 D1.recv MLP1 C1.send A1_0 C1.recv"
    ),
    ("lightllm_decode", "deepep_low_latency"): (
        "D0.send A0_1 A1_1 D0.recv S1 D1.send MLP0 D1.recv C0.send MLP1 C0.recv C1.send A0_0 A1_0 C1.recv S0"
    ),
    ("lightllm_decode", "symm_copy"): (
        "D0.send C1.recv A0_1 A1_1 S1 D1.send D0.recv MLP0 C0.send D1.recv MLP1 C1.send C0.recv A0_0 A1_0 S0"
    ),
    ("ascend_d0d1c0c1", "nccl"): (
        "D0.send S0 C1.recv A0_1 A1_1 D1.send S1 D0.recv MLP0 C0.send D1.recv MLP1 C1.send C0.recv A0_0 A1_0"
    ),
    ("deepseek_five_stage", "deepep_low_latency"): (
        "D0.send S0 A0_1 D0.recv MLP0 C0.send A1_1 C0.recv D1.send S1 A0_0 D1.recv MLP1 C1.send A1_0 C1.recv"
    ),
    ("deepseek_five_stage", "deepep_v2"): (
        "D0.send S0 C1.recv A0_1 D0.recv MLP0 C0.send A1_1 D1.send S1 C0.recv A0_0 D1.recv MLP1 C1.send A1_0"
    ),
}


def test_the_seeds_order_comes_out_letter_by_letter():
    schedule = load_schedule("mlp_shared_overlap")
    assert order_line(schedule, backend="deepep_low_latency", leader=1, pretty=True) == SEED_ORDER


@pytest.mark.parametrize(("name", "backend"), GOLDEN, ids=["-".join(key) for key in GOLDEN])
def test_golden_orders(name, backend):
    assert order_line(load_schedule(name), backend=backend) == GOLDEN[name, backend]


def test_the_hookless_form_keeps_the_compute_order_of_the_seed():
    schedule = load_schedule("mlp_shared_overlap")

    def compute(backend):
        window = steady_window(ring_order(schedule, backend=backend))
        return [(s.point, s.ubatch) for s in window if not s.point.endswith(("send", "recv"))]

    assert compute("nccl") == compute("deepep_low_latency")


def test_a_whole_region_starts_and_drains():
    steps = ring_order(load_schedule("mlp_shared_overlap"), layers=1)
    told = [f"{s.point}{s.ubatch} by {s.runner} in {s.turn}" for s in steps]
    assert told == [
        "A00 by 0 in 0",
        "A10 by 0 in 0",
        "D.send0 by 0 in 0",
        "A01 by 1 in 1",
        "A11 by 1 in 1",
        "D.recv0 by 1 in 1",
        "D.send1 by 1 in 1",
        "MLP0 by 0 in 2",
        "D.recv1 by 0 in 2",
        "C.send0 by 0 in 2",
        "S0 by 0 in 2",
        "MLP1 by 1 in 3",
        "C.recv0 by 1 in 3",
        "C.send1 by 1 in 3",
        "S1 by 1 in 3",
        "C.recv1 by 0 in 4",  # ubatch 0 runs the pending hook at its exit
    ]


@pytest.mark.parametrize("num_ubatches", [2, 3, 4])
@pytest.mark.parametrize("name", ["mlp_shared_overlap", "vllm_high_throughput", "lightllm_decode"])
def test_every_point_once_for_any_number_of_ubatches(name, num_ubatches):
    steps = ring_order(load_schedule(name), backend="nccl", num_ubatches=num_ubatches, layers=3)
    reached = [(s.point, s.ubatch, s.layer) for s in steps]
    points = load_schedule(name).order("nccl")
    assert sorted(reached) == sorted((p, u, n) for p in points for u in range(num_ubatches) for n in range(3))


def test_three_ubatches_take_turns():
    assert order_line(load_schedule("mlp_shared_overlap"), backend="nccl", num_ubatches=3).startswith(
        "D0.send C1.recv A0_1 A1_1 D1.send C2.recv A0_2 A1_2 D2.send D0.recv MLP0 C0.send S0 D1.recv MLP1"
    )


def test_a_hook_is_left_with_the_next_ubatch():
    line = order_line(load_schedule("mlp_shared_overlap"), backend="deepep_low_latency", num_ubatches=3)
    assert line == (
        "D0.send A0_1 A1_1 D0.recv D1.send A0_2 A1_2 D1.recv D2.send MLP0 D2.recv C0.send S0 MLP1 C0.recv C1.send S1 "
        "MLP2 C1.recv C2.send S2 A0_0 A1_0 C2.recv"
    )


def test_an_offset_moves_the_leader_ahead_and_leaves_it_out_at_the_end():
    text = "schedule t\nbackends nccl\noffset {}\nlayer A0 | A1 D.send@comm S | D.recv MLP C.send@comm | C.recv\n"
    starts = []
    for offset in range(3):
        steps = ring_order(parse_schedule(text.format(offset)), layers=2)
        first = next(i for i, s in enumerate(steps) if s.ubatch == 1)
        starts.append(" ".join(s.point for s in steps[:first]))
    assert starts == ["A0", "A0 A1 D.send S", "A0 A1 D.send S D.recv MLP C.send"]


def test_a_carried_wait_is_played_as_part_of_its_own_layer():
    carried = load_schedule("lightllm_decode")
    program = carried.program("nccl")
    assert program.carries
    folded = Schedule(name="f", backends=("nccl",), programs=(LayerProgram(items=program.folded),))
    assert ring_order(carried, backend="nccl") == ring_order(folded)
    steps = ring_order(carried, backend="nccl", layers=2)
    assert [s.layer for s in steps if s.point == "C.recv" and s.ubatch == 0] == [0, 1]
    assert steps[0].point == "A0"


def test_a_receive_before_its_hook_is_refused():
    schedule = parse_schedule(
        "schedule t\nbackends deepep_low_latency\nlayer A0 A1 D.send D.recv MLP hook C.send S | C.recv"
    )
    with pytest.raises(ScheduleError, match=r"peer runs a receive hook.*point=D\.recv, ubatch=0, layer=0; put a yield"):
        ring_order(schedule)


def test_a_second_hook_with_the_same_peer_is_refused():
    items = (Point("A0"), Point("D.send"), Point("C.send"), Yield(), RunRecvHook(), Point("D.recv"), Point("C.recv"))
    schedule = Schedule(name="t", backends=("deepep_low_latency",), programs=(LayerProgram(items=items),))
    with pytest.raises(ScheduleError, match=r"one receive hook at a time.*pending=D\.recv"):
        ring_order(schedule)


def test_a_lone_survivor_receives_at_once():
    run = run_ring(load_schedule("sglang_decode"), backend="deepep_low_latency", layers=1)
    last = [(s.point, s.runner) for s in run.steps if s.ubatch == 1][-3:]
    assert last == [("MLP", 1), ("C.send", 1), ("C.recv", 1)]


def test_a_steady_window_needs_three_layers():
    with pytest.raises(ScheduleError, match="layers=2"):
        steady_window(ring_order(load_schedule("mlp_shared_overlap"), layers=2))


def test_a_leader_is_a_ubatch():
    with pytest.raises(ScheduleError, match="leader=2"):
        order_line(load_schedule("mlp_shared_overlap"), leader=2)
