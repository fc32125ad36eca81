"""Counts, streams and waits that a schedule declares."""

import pytest

from dbo.errors import ScheduleError
from dbo.schedule import load_schedule


@pytest.mark.parametrize(
    ("name", "per_layer", "counts"),
    [
        ("mlp_shared_overlap", 2, [6, 6]),
        ("vllm_high_throughput", 3, [9, 9]),
        ("sglang_prefill", 2, [6, 6]),
        ("sglang_decode", 5, [13, 13]),  # 15 less the offset of 2
        ("lightllm_decode", 2, [6, 6]),
        ("ascend_d0d1c0c1", 2, [6, 6]),
        ("deepseek_five_stage", 3, [8, 8]),
    ],
)
def test_yields(name, per_layer, counts):
    schedule = load_schedule(name)
    assert schedule.yields_per_layer == per_layer
    assert [schedule.yields(3, ubatch, 2) for ubatch in range(2)] == counts


def test_the_offset_is_skipped_at_the_start_by_the_first_and_at_the_end_by_the_last():
    schedule = load_schedule("sglang_decode")

    def skipped(ubatch, num_ubatches):
        return [i for i in range(10) if schedule.skips(i, num_moe_layers=2, ubatch=ubatch, num_ubatches=num_ubatches)]

    assert [skipped(u, 3) for u in range(3)] == [[0, 1], [], [8, 9]]
    assert skipped(0, 1) == []


def test_streams_follow_the_backend():
    schedule = load_schedule("mlp_shared_overlap")
    assert schedule.stream_of("D.send", "deepep_low_latency") == "compute"
    assert schedule.stream_of("D.send", "nccl") == "comm"
    assert schedule.order("nccl") == ("A0", "A1", "D.send", "D.recv", "MLP", "C.send", "S", "C.recv")
    with pytest.raises(ScheduleError, match="point=copy"):
        schedule.stream_of("copy", "nccl")


def test_a_schedule_runs_on_its_own_backends_only():
    with pytest.raises(ScheduleError, match=r"schedule=sglang_prefill, backend=deepep_low_latency; use one of"):
        load_schedule("sglang_prefill").program("deepep_low_latency")


def test_a_stream_waits_for_producers_on_the_other_one_only():
    high_throughput = load_schedule("vllm_high_throughput").program("nccl")
    waits = {point.name: high_throughput.waits_for(point.name) for point in high_throughput.points}
    assert {name: on for name, on in waits.items() if on} == {
        "A0": ("copy",),
        "D.send": ("A1",),
        "D.recv": ("D.send",),
        "C.send": ("MLP",),
    }
    low_latency = load_schedule("mlp_shared_overlap").program("deepep_low_latency")
    assert not any(low_latency.waits_for(point.name) for point in low_latency.points)
