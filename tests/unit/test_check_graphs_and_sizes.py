"""graph-capture, graph-stale, capacity, slot-cycle, numeric, and the parts that pairs share, on hand-made traces."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from dbo.check import judge
from dbo.errors import UsageError
from dbo.trace import Trace
from tests.unit.trace_builder import TraceBuilder
from tests.unit.trace_queries import found, named, only
from tests.unit.trace_step import low_latency_run

GOOD = low_latency_run(ranks=2, layers=3)


@pytest.fixture
def run() -> Trace:
    return copy.deepcopy(GOOD)


@pytest.mark.parametrize(
    ("detector", "kind", "attribute"),
    [
        ("graph-capture", "graph.put", "key"),
        ("graph-capture", "graph.get", "key"),
        ("graph-stale", "replay", "graph"),
        ("graph-stale", "bake", "generation"),
        ("capacity", "reserve", "size"),
        ("capacity", "use", "slot"),
        ("capacity", "use", "what"),
        ("numeric", "numeric", "error"),
        ("numeric", "numeric", "limit"),
    ],
)
def test_a_missing_attribute_is_an_error_that_names_it(run: Trace, detector: str, kind: str, attribute: str) -> None:
    for record in run.of_kind(kind):
        del record.attrs[attribute]
    with pytest.raises(UsageError, match=f"{kind} carries attrs {attribute}"):
        found(run, detector)


# -- graph-capture ----------------------------------------------------------------------------------------------------


def captured(*inside: tuple[str, dict[str, Any]], ends: bool = True) -> Trace:
    b = TraceBuilder(ranks=1)
    b.add("capture.begin", "main", "g", graph="g")
    for kind, attrs in inside:
        b.add(kind, "main", **attrs)
    if ends:
        b.add("capture.end", "main", "g", graph="g", calls=1)
    return b.trace


def test_host_waits_and_host_collectives_are_forbidden_while_capturing() -> None:
    signature = {
        "group": "control",
        "index": 0,
        "op": "all_reduce",
        "shape": [],
        "dtype": "int32",
        "tag": 0,
        "ranks": 1,
    }
    for kind, attrs in (("host.wait", {"why": "sample", "declared": True}), ("collective", signature)):
        violation = named(captured((kind, attrs)), "graph-capture")
        assert kind in violation.sentence and "while it captures g" in violation.sentence
        assert found(captured(), "graph-capture") == []


def test_a_capture_that_fails_or_never_ends() -> None:
    error = ("error", {"type": "CaptureError", "message": "streams that joined are joined again: streams=comm"})
    assert "streams=comm" in named(captured(error, ends=False), "graph-capture").sentence
    assert "never ends the capture of g" in named(captured(ends=False), "graph-capture").sentence


@pytest.mark.parametrize("change", ["key", "program"])
def test_a_lookup_names_the_key_or_both_programs(run: Trace, change: str) -> None:
    for record in run.of_kind("graph.get"):
        record.attrs[change] = {"rows": [8]}
    violations = found(run, "graph-capture")
    assert {v.rank for v in violations} == {0, 1}
    words = ("finds no graph", "was stored under", "[6]") if change == "key" else ("replays the graph of", "[6]", "[8]")
    assert all(word in violations[0].sentence for word in words)


def test_a_graph_is_looked_up_after_it_was_stored() -> None:
    b = TraceBuilder(ranks=1)
    b.add("graph.get", "main", key=[4])
    b.add("graph.put", "main", key=[4])
    assert "finds no graph under [4]" in named(b.trace, "graph-capture").sentence


def test_ranks_that_look_up_different_graphs(run: Trace) -> None:
    only(run, "graph.get", rank=1).attrs["key"] = {"rows": [4]}
    (violation,) = found(run, "dp-disagreement")
    assert violation.rank == 1 and "rows=[6] and rows=[4]" in violation.sentence


# -- graph-stale ------------------------------------------------------------------------------------------------------


def test_a_replay_after_a_captured_buffer_was_freed(run: Trace) -> None:
    at = run.records.index(only(run, "use", rank=0))
    use = run.records[at]
    use.kind, use.attrs = "unbake", {"buffer": 1, "graphs": ["g"]}
    violation = named(run, "graph-stale")
    assert violation.rank == 0 and "captured and then freed" in violation.sentence
    use.attrs["graphs"] = ["another"]
    assert found(run, "graph-stale") == []


def test_a_replay_after_its_slot_was_allocated_anew(run: Trace) -> None:
    use = only(run, "use", rank=1)
    use.kind, use.attrs = "reserve", {"what": "staging", "slot": "u0", "size": 64, "generation": 2}
    violation = named(run, "graph-stale")
    assert violation.rank == 1 and "generation 1" in violation.sentence and "generation 2" in violation.sentence


def test_a_replay_with_a_value_that_has_moved_on(run: Trace) -> None:
    only(run, "replay", rank=1).attrs["live"] = {"buffer": 1}
    assert "captured buffer=0, now it has to be 1" in named(run, "graph-stale").sentence


# -- capacity ---------------------------------------------------------------------------------------------------------


def test_sizes_that_are_alive_together_are_summed_and_not_maximised(run: Trace) -> None:
    use = only(run, "use", rank=1)
    use.attrs["size"] = [32, 33]
    violation = named(run, "capacity")
    assert (
        violation.rank == 1 and "65 (32 + 33 alive together)" in violation.sentence and "are 64" in violation.sentence
    )
    use.attrs["size"] = 33
    assert found(run, "capacity") == []


def test_a_use_without_a_reservation_and_growth_after_the_lock(run: Trace) -> None:
    use = only(run, "use", rank=0)
    use.attrs["slot"] = "u1"
    assert "without a reservation" in named(run, "capacity").sentence
    use.kind, use.attrs = "reserve", {"what": "staging", "slot": "u0", "size": 65}
    assert "grows from 64 to 65 after the lock" in named(run, "capacity").sentence
    use.attrs["size"] = 64
    assert found(run, "capacity") == []


# -- slot-cycle -------------------------------------------------------------------------------------------------------


def launched(*orders: str, n: int = 32, holds: bool = True) -> Trace:
    b = TraceBuilder(ranks=len(orders))
    for rank, order in enumerate(orders):
        for name in order:
            b.op(
                name,
                rank=rank,
                line={"N": "comm", "L": "compute"}[name],
                sms={"N": n, "L": 120}[name],
                holds_until_peers=holds,
                group=name,
                index=0,
            )
    return b.trace


def test_opposite_orders_are_a_cycle_even_in_a_run_that_went_well() -> None:
    violation = found(launched("NL", "LN"), "slot-cycle")[0]
    assert violation.rank == 1 and len(violation.records) == 3
    assert "rank 0 launches N (32 SMs) before L (120), rank 1 launches L (120) before N (32)" in violation.sentence


@pytest.mark.parametrize(
    "trace",
    [launched("NL", "NL"), launched("NL", "LN", n=12), launched("NL", "LN", holds=False), launched("N", "L")],
    ids=["equal order", "both fit", "nobody holds", "nothing shared"],
)
def test_no_cycle(trace: Trace) -> None:
    assert found(trace, "slot-cycle") == []


def test_two_ranks_of_three_are_enough() -> None:
    assert {v.rank for v in found(launched("NL", "NL", "LN"), "slot-cycle")} == {2}


def test_a_kernel_that_no_device_can_hold(run: Trace) -> None:
    only(run, "send", rank=1).attrs["sms"] = 133
    assert "wants 133 SMs, a device has 132" in named(run, "slot-cycle").sentence
    run.meta["sms"] = 148
    assert found(run, "slot-cycle") == []


# -- numeric, and padding by comparison -------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [1e-3, float("inf"), float("nan")])
def test_numeric_names_the_result_and_the_limit(run: Trace, error: float) -> None:
    record = only(run, "numeric", rank=1)
    record.name, record.attrs["error"] = "logits", error
    violation = named(run, "numeric")
    assert violation.rank == 1 and "logits of rank 1" in violation.sentence and "0.0001" in violation.sentence
    record.attrs["varied"] = "padding"
    assert found(run, "numeric") == [] and named(run, "padding-leak").rank == 1


# -- sizes of exchanges, needless padding --------------------------------------------------------------------


def test_rows_sent_are_rows_expected() -> None:
    b = TraceBuilder(ranks=2)
    for rank, (sends, receives) in enumerate([([2, 3], [2, 4]), ([4, 1], [2, 1])]):
        b.add(
            "collective",
            "comm",
            "a2a",
            rank=rank,
            group="ep",
            index=0,
            op="a2a",
            shape=[8],
            dtype="bf16",
            tag=0,
            ranks=2,
            sends=sends,
            receives=receives,
        )
    (violation,) = found(b.trace, "collective-mismatch")
    assert violation.rank == 1 and "rank 0 sends rank 1 3 rows, rank 1 expects 2" in violation.sentence
    b.trace.records[1].attrs["receives"] = [3, 1]
    assert found(b.trace, "collective-mismatch") == []


def decisions(rows: list[int], mode: str = "NONE", split: bool = False) -> Trace:
    b = TraceBuilder(ranks=2)
    table = [[0, 0], [40, 0], [40, 1], [0, 0], [0, 0], [0, 0], [0, 0]]
    decision = {"split": split, "num_tokens_padded": rows, "cudagraph_mode": mode, "num_ubatches": 2, "all_idle": False}
    for rank in range(2):
        b.add("decide", "main", rank=rank, table=table, decision=decision)
    return b.trace


def test_padding_is_for_splits_and_graphs_only() -> None:
    violations = found(decisions([40, 40]), "padding-leak")
    assert [v.rank for v in violations] == [1, 1] and "its own count is 1" in violations[0].sentence
    for right in (decisions([40, 1]), decisions([40, 40], mode="FULL"), decisions([40, 40], split=True)):
        assert found(right, "padding-leak") == []


def test_config_that_is_accepted_and_fatal_or_idle(run: Trace) -> None:
    for changes in ({"enable_expert_parallel": False}, {"data_parallel_size": 1}):
        for record in run.of_kind("config"):
            record.attrs["config"] = {"enable_dbo": True, "data_parallel_size": 2} | changes
        assert "can do nothing" in named(run, "config").sentence
    b = TraceBuilder(ranks=1)
    b.add("config", "main", config={})
    b.add("error", "main", type="AssertionError", message="backend")
    assert "died in set-up with AssertionError: backend" in named(b.trace, "config").sentence
    b.trace.records[-1].attrs["type"] = "ConfigError"
    assert judge(b.trace).violations == ()
