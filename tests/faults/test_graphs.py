"""Graphs that are looked up under another key, replay another program, or touch memory that is not theirs any more.

Needs torch, for the workspace.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dbo.batch.slicing import UBatchSlice
from dbo.check import judge
from dbo.config import DBOConfig
from dbo.dcp.workspace import Slot, Spec, WorkspaceManager
from dbo.engine.batch import build_batch
from dbo.engine.sampling import SamplingParams
from dbo.engine.scheduled import ScheduledBatch, ScheduledRequest, uniform_query_len
from dbo.moe.deepep_low_latency import DeepEPLowLatencyPrepareAndFinalize
from dbo.trace import Trace
from dbo.ubatching.forward_context import ForwardContext
from dbo.ubatching.graphs import GraphKey, StepGraphs, graph_key
from sim.world import SimWorld
from tests.faults.pair import Pair, check_pair, op, run
from tests.faults.storages import Storages

CONFIG = DBOConfig(data_parallel_size=2, enable_expert_parallel=True, cudagraph_mode="FULL")
SLOT = Slot(0, "dcp")


def rows(count: int) -> Spec:
    return (count, 64), torch.float32


# -- memory from a pool that grows: vllm#45487 ------------------------------------------------------------------------


def grown(*, own_staging: bool, largest_first: bool = False, checks: bool = False) -> Trace:
    """Capture with staging of 4 rows; a warm-up after the capture asks for 8; replay."""

    def program(world: SimWorld) -> None:
        workspace, bytes_of = WorkspaceManager(recorder=world.trace), Storages(world)
        if largest_first:
            workspace.get_simultaneous(rows(8), slot=SLOT)
        graph = world.new_graph("G4")
        with workspace.capturing("G4", own_staging=own_staging), graph.capture():
            (staging,) = workspace.get_simultaneous(rows(4), slot=SLOT)
            op(world, "pack", us=2, writes=[bytes_of(staging)])
        workspace.get_simultaneous(rows(8), slot=SLOT, caller="warm-up")
        if checks:
            workspace.check_replay("G4")
        graph.replay()

    return run(program)


# -- memory from a pool that recycles: lil#117 ------------------------------------------------------------------------


class SharedPool:
    """One pool under all graphs: what is dropped is handed out again."""

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []

    def take(self) -> torch.Tensor:
        return self._free.pop() if self._free else torch.empty(rows(8)[0], dtype=torch.float32)

    def drop(self, block: torch.Tensor) -> None:
        self._free.append(block)


def two_sizes(order: Sequence[str], *, temporary: bool) -> Trace:
    """Graphs of 8 and of 4 rows; both are replayed in one step, then both outputs are read."""

    def program(world: SimWorld) -> None:
        workspace, pool, bytes_of = WorkspaceManager(recorder=world.trace), SharedPool(), Storages(world)
        graphs: dict[str, Any] = {}
        for name, count in (("G8", 8), ("G4", 4)):
            graph = world.new_graph(name)
            out = bytes_of(pool.take(), f"output of {name}")
            with workspace.capturing(name), graph.capture():
                block = pool.take() if temporary else workspace.get_simultaneous(rows(count), slot=SLOT)[0]
                staging = bytes_of(block, f"staging of {name}")
                op(world, "pack", us=2, writes=[staging], tags={staging.buffer: f"rows of {name}"})
                op(
                    world,
                    "merge",
                    us=2,
                    reads=[staging],
                    writes=[out],
                    expects={staging.buffer: f"rows of {name}"},
                    tags={out.buffer: f"result of {name}"},
                )
            if temporary:
                pool.drop(block)  # nobody holds the staging after the capture
            graphs[name] = graph, out
        for name in order:
            graphs[name][0].replay()
        for name in order:
            out = graphs[name][1]
            op(world, f"sample {name}", us=1, reads=[out], expects={out.buffer: f"result of {name}"})

    return run(program)


# -- keys: vllm#43145 -------------------------------------------------------------------------------------------------

KeyOf = Callable[[Sequence[int]], GraphKey]


def whole_key(sizes: Sequence[int]) -> GraphKey:
    return graph_key(CONFIG, "s", num_tokens=sizes, num_reqs=sizes, query_len=1)


def first_two(sizes: Sequence[int]) -> GraphKey:
    return whole_key([sum(sizes[:2])])


def sum_of_all(sizes: Sequence[int]) -> GraphKey:
    return whole_key([sum(sizes)])


def looked_up(captured: Sequence[int], wanted: Sequence[int], *, put: KeyOf, get: KeyOf) -> Trace:
    """Capture a step of these ubatches, then run one."""

    def context(sizes: Sequence[int], key: GraphKey, step: int) -> ForwardContext:
        return ForwardContext(
            attn_metadata=None,
            num_tokens=sum(sizes),
            step=step,
            graph_key=key,
            ubatch_slices=[UBatchSlice(slice(0, n), slice(0, n)) for n in sizes],
            ubatch_metadata=[SimpleNamespace(num_actual_tokens=n) for n in sizes],
        )

    def program(world: SimWorld) -> None:
        graphs = StepGraphs(world)
        graphs.capturing = True
        world.in_ubatch(-1, step=-2)
        graphs.capture(context(captured, put(captured), -2), {}, lambda: op(world, "forward", us=5))
        world.in_ubatch(-1, step=0)
        graphs.replay(context(wanted, get(wanted), 0), {})

    return run(program)


# -- one classification: vllm#45425 -----------------------------------------------------------------------------------


def two_by_two(prefilling: bool) -> ScheduledBatch:
    """Two requests of two tokens; with a decode length of one they count as prefills."""
    requests = tuple(
        ScheduledRequest(
            request_id=f"r{i}",
            token_ids=(1, 2),
            num_computed_tokens=4,
            block_ids=(1 + i,),
            is_prefilling=prefilling,
            samples=True,
            sampling=SamplingParams(),
            output_index=0,
        )
        for i in range(2)
    )
    return ScheduledBatch(requests=requests, block_tokens=16)


def lengths_only(batch: ScheduledBatch) -> int:
    """The dispatcher classifies by length, the metadata by what is prefilling."""
    lengths = {r.query_len for r in batch.requests}
    return lengths.pop() if len(lengths) == 1 else 0


def drafts(classify: Callable[[ScheduledBatch], int]) -> Trace:
    def context(batch: ScheduledBatch, query_len: int, step: int) -> ForwardContext:
        plan = build_batch(batch, num_tokens_padded=4).plan
        key = graph_key(CONFIG, "s", num_tokens=[4], num_reqs=[2], query_len=query_len)
        return ForwardContext(attn_metadata=plan, num_tokens=4, step=step, graph_key=key)

    def program(world: SimWorld) -> None:
        graphs = StepGraphs(world)
        graphs.capturing = True
        world.in_ubatch(-1, step=-2)
        graphs.capture(context(two_by_two(False), 2, -2), {}, lambda: op(world, "decode", us=5))
        world.in_ubatch(-1, step=0)
        batch = two_by_two(True)
        query_len = classify(batch)
        if query_len:
            graphs.replay(context(batch, query_len, 0), {})
        else:
            op(world, "prefill", us=9)

    return run(program)


# -- a value in the graph: the parity of low-latency calls ------------------------------------------------------------


def two_calls(eager_between: int) -> Trace:
    """A graph of two low-latency calls, replayed after some eager ones on every rank."""

    def program(world: SimWorld) -> None:
        backend = DeepEPLowLatencyPrepareAndFinalize(world, world.low_latency, num_experts=4, max_tokens_per_rank=4)
        x, ids = world.tensors.op("x", [], (4, 8)), world.tensors.op("ids", [], (4, 2))
        world.set_real_tokens(4)

        def calls(count: int) -> None:
            for _ in range(count):
                hook, _ = backend.prepare_async(x, ids, ids)
                hook()

        graph = world.new_graph("decode")
        with graph.capture():
            calls(2)
        calls(eager_between)
        graph.replay([4, 4])

    return run(program, ranks=2)


def sums(captured: Sequence[int], wanted: Sequence[int]) -> Trace:
    return looked_up(captured, wanted, put=first_two, get=sum_of_all)


PAIRS = [
    Pair(
        case="vllm-project/vllm#45487",
        id="graph-stale",
        uses="dbo.dcp.workspace.WorkspaceManager",
        buggy=lambda: grown(own_staging=False),
        fixed=lambda: grown(own_staging=True),
        culprit={"rank": 0},
        says=("replay of G4", "slot u0/dcp as of generation 1", "generation 2"),
    ),
    Pair(
        case="vllm-project/vllm#45487",
        name="largest first",
        id="graph-stale",
        uses="dbo.dcp.workspace.WorkspaceManager",
        buggy=lambda: grown(own_staging=False),
        fixed=lambda: grown(own_staging=False, largest_first=True),
        culprit={"rank": 0},
        says=("replay of G4",),
    ),
    Pair(
        case="local-inference-lab/vllm#117",
        id="buffer-reuse",
        uses="dbo.dcp.workspace.WorkspaceManager",
        buggy=lambda: two_sizes(["G4", "G8"], temporary=True),
        fixed=lambda: two_sizes(["G4", "G8"], temporary=False),
        culprit={"rank": 0},
        says=("sample G4", "expects result of G4", "finds rows of G8", "written by pack"),
    ),
    Pair(
        case="vllm-project/vllm#43145",
        name="3x4",
        id="graph-capture",
        uses="dbo.ubatching.graphs.graph_key",
        buggy=lambda: sums([4] * 3, [4] * 3),
        fixed=lambda: looked_up([4] * 3, [4] * 3, put=whole_key, get=whole_key),
        culprit={"rank": 0, "step": 0},
        says=("finds no graph", '"num_tokens": [12]', "was stored under", "[8]"),
    ),
    Pair(
        case="vllm-project/vllm#43145",
        name="4x2",
        id="graph-capture",
        uses="dbo.ubatching.graphs.graph_key",
        buggy=lambda: sums([2] * 4, [2] * 4),
        fixed=lambda: looked_up([2] * 4, [2] * 4, put=whole_key, get=whole_key),
        culprit={"rank": 0, "step": 0},
        says=("finds no graph", '"num_tokens": [8]', "was stored under", "[4]"),
    ),
    Pair(
        case="vllm-project/vllm#45425",
        id="graph-capture",
        uses="dbo.engine.scheduled.uniform_query_len",
        buggy=lambda: drafts(lengths_only),
        fixed=lambda: drafts(uniform_query_len),
        culprit={"rank": 0, "step": 0},
        says=("replays the graph of", '"num_prefills": [0]', '"num_prefills": [2]'),
    ),
]


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_pair(pair: Pair) -> None:
    check_pair(pair)


@pytest.mark.parametrize("between", [0, 1, 2, 3])
def test_a_graph_of_low_latency_calls_starts_at_an_even_call(between: int) -> None:
    report = judge(two_calls(between))
    if between % 2 == 0:
        assert report.verdict.text == "proved"
    else:
        assert report.verdict.text == "violated(graph-stale)"
        assert "captured low_latency_buffer=0, now it has to be 1" in report.violations[0].sentence


def test_two_ubatches_hide_the_sum_of_the_first_two() -> None:
    assert judge(sums([8, 8], [8, 8])).verdict.text == "proved"


def test_a_step_of_two_must_not_hit_the_graph_of_three() -> None:
    report = judge(sums([4] * 3, [4] * 2))
    assert report.verdict.text == "violated(graph-capture)"
    assert 'replays the graph of {"num_prefills": [0, 0, 0], "num_tokens": [4, 4, 4]}' in report.violations[0].sentence
    assert whole_key([4] * 3) != whole_key([4] * 2)


@pytest.mark.parametrize("sizes", [(4, 4), (8, 8), (4, 4, 4), (2, 2, 2, 2), (3, 4), (4, 3)], ids=str)
def test_put_and_get_are_one_function(sizes: tuple[int, ...]) -> None:
    assert judge(looked_up(sizes, sizes, put=whole_key, get=whole_key)).verdict.text == "proved"
    assert whole_key(sizes) == whole_key(list(sizes)) != whole_key(sizes[::-1] if sizes[0] != sizes[1] else (*sizes, 1))


def test_the_other_order_of_replays_hides_the_recycled_block() -> None:
    assert judge(two_sizes(["G8", "G4"], temporary=True)).verdict.text == "proved"
    assert judge(two_sizes(["G8", "G4"], temporary=False)).verdict.text == "proved"


def test_the_workspace_refuses_the_stale_replay_itself() -> None:
    trace = grown(own_staging=False, checks=True)
    (error,) = trace.of_kind("error")
    assert error.attrs["type"] == "WorkspaceError" and "captured_generation=1, generation=2" in error.attrs["message"]
    assert list(trace.of_kind("replay")) == []
