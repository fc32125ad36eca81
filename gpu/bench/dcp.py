"""Needs torch, Triton and a CUDA device. What `dbo bench dcp` asks of devices: kernels, graphs, the direct path.

`dbo` names this module as a string; see `dbo.registry.dcp_bench_device`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

from dbo.bench.dcp import DCPBench, DCPRow
from dbo.bench.dcp_processes import LIMITS, Inputs
from dbo.dcp.direct import DirectLayout
from dbo.dcp.exchange import PackKernels
from dbo.dcp.workspace import WorkspaceManager
from gpu.alltoall.symm import symmetric_region
from gpu.kernels.exchange import DirectExchange, ExchangeTuning, default_tuning, new_region
from gpu.kernels.packed import TRITON_KERNELS

_ends: dict[tuple[int, int], DirectExchange] = {}


def kernels() -> PackKernels:
    """The fused ones."""
    return TRITON_KERNELS


def layout_of(bench: DCPBench) -> DirectLayout:
    """Room for the largest B."""
    item_bytes = getattr(torch, bench.dtype).itemsize
    most = max(bench.rows) * (bench.heads // bench.ranks)
    return DirectLayout(world_size=bench.ranks, max_rows=most, row_bytes=bench.head_dim * item_bytes)


def direct(bench: DCPBench, out: torch.Tensor, lse: torch.Tensor, group: Any) -> Callable[[], torch.Tensor]:
    """One exchange of this rank through symmetric memory; the region is shared by all B, its epochs go on."""
    layout = layout_of(bench)
    key = (group.rank, layout.total_bytes)
    if key not in _ends:
        region, addresses = symmetric_region(layout, group.device_group)
        _ends[key] = DirectExchange(
            layout=layout, rank=group.rank, region=region, peer_addresses=addresses, tuning=default_tuning(out.device)
        )
    end = _ends[key]
    end.prepare(out, lse)
    return lambda: end.launch(out, lse)[0]


def captured(call: Callable[[], torch.Tensor], workspace: WorkspaceManager, name: str) -> Callable[[], torch.Tensor]:
    """The same exchange from a CUDA graph."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with workspace.capturing(name), torch.cuda.graph(graph):
        result = call()

    def replay() -> torch.Tensor:
        graph.replay()
        return result

    return replay


def virtual_ranks(bench: DCPBench) -> list[DCPRow]:
    """C virtual ranks on C streams of one device, eager and in graphs: right first, then timed. No link is crossed."""
    layout, device = layout_of(bench), "cuda"
    regions = [new_region(layout, device) for _ in range(bench.ranks)]
    addresses = [region.data_ptr() for region in regions]
    tuning = ExchangeTuning(programs=default_tuning(device, ranks_on_device=bench.ranks, programs_per_sm=1).programs)
    ends = [
        DirectExchange(layout=layout, rank=rank, region=regions[rank], peer_addresses=addresses, tuning=tuning)
        for rank in range(bench.ranks)
    ]
    streams = [torch.cuda.Stream() for _ in ends]
    torch.cuda.synchronize()
    return [row for rows in bench.rows for row in _virtual(bench, rows, ends, streams)]


def _virtual(bench: DCPBench, rows: int, ends: list[DirectExchange], streams: list[Any]) -> list[DCPRow]:
    inputs = [Inputs(bench, rows, rank, "cuda") for rank in range(bench.ranks)]
    results = []
    for end, each in zip(ends, inputs, strict=True):
        mine = bench.heads // bench.ranks
        merged = torch.empty(rows, mine, bench.head_dim, dtype=each.out.dtype, device="cuda")
        lse = torch.empty(rows, mine, dtype=torch.float32, device="cuda")
        end.prepare(each.out, each.lse, merged_BND=merged, merged_lse_BN=lse)
        results.append((merged, lse))
    graphs = []
    for end, each, (merged, lse), stream in zip(ends, inputs, results, streams, strict=True):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            end.launch(each.out, each.lse, merged_BND=merged, merged_lse_BN=lse)
        graphs.append(graph)
    torch.cuda.synchronize()

    def eager() -> None:
        for end, each, (merged, lse), stream in zip(ends, inputs, results, streams, strict=True):
            with torch.cuda.stream(stream):
                end.launch(each.out, each.lse, merged_BND=merged, merged_lse_BN=lse)

    def replayed() -> None:
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()

    found = []
    nbytes = bench.payload_bytes(rows, inputs[0].out.element_size())
    for mode, call in (("eager", eager), ("graph", replayed)):
        for merged, _ in results:
            merged.fill_(float("nan"))
        torch.cuda.synchronize()
        call()
        torch.cuda.synchronize()
        error = max(each.error(merged) for each, (merged, _) in zip(inputs, results, strict=True))
        right = error <= LIMITS[bench.dtype]
        samples = tuple(_sample_ms(call, bench.inner, streams) for _ in range(bench.repeat)) if right else ()
        found.append(
            DCPRow(
                path="a2a_direct",
                mode=mode,
                rows=rows,
                payload_bytes=nbytes,
                error=error,
                limit=LIMITS[bench.dtype],
                samples_ms=samples,
                limit_ms=_copy_ms(nbytes * bench.ranks),
                note="virtual ranks; of limit: a device copy of all payloads",
            )
        )
    return found


def _sample_ms(call: Callable[[], None], inner: int, streams: list[Any]) -> float:
    """Mean time of `inner` exchanges of all ranks."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for stream in streams:
        stream.wait_event(begin)
    for _ in range(inner):
        call()
    for stream in streams:
        torch.cuda.current_stream().wait_stream(stream)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / inner


def _copy_ms(nbytes: int) -> float:
    source = torch.empty(max(nbytes, 1), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return statistics.median(
        _sample_ms(lambda: target.copy_(source), 4, [])
        for _ in range(5)  # type: ignore[arg-type, return-value]
    )
