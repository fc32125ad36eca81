"""Faults of data: metadata, padding rows, buffers, exchanges in another order."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from dbo.batch.slicing import slice_plan
from dbo.engine.components import Components
from dbo.errors import UsageError
from dbo.moe.modular_kernel import FusedMoEModularKernel
from sim.faults.clean_run import CleanRun, every_split_rank
from sim.faults.fault import Fault, Site

# Per-request fields that slicing changes where a request straddles a split point.
ADJUSTED_FIELDS = ("seq_lens", "num_computed_tokens")


def whole_metadata(program: Components, site: Site) -> Components:
    """One field of a slice is taken from the parent, cut by request but not adjusted."""
    if site.field not in ADJUSTED_FIELDS:
        rule = "--inject whole-metadata leaves a field whole that slicing adjusts"
        raise UsageError.of(rule, fix="use seq_lens or num_computed_tokens", field=site.field)

    def careless(plan: Any, piece: Any, *args: Any, **kwargs: Any) -> Any:
        part = slice_plan(plan, piece, *args, **kwargs)
        return dataclasses.replace(part, **{site.field: getattr(plan, site.field)[piece.request_slice].copy()})

    return replace(program, slice_plan=careless)


def padding_leak(program: Components, site: Site) -> Components:
    """Padding rows keep a real expert id, so they are dispatched."""

    class Leaking(FusedMoEModularKernel):
        def parts(self, hidden: Any, topk_weights: Any, topk_ids: Any, *, layer: int) -> tuple[Any, Any]:
            if hasattr(topk_ids, "notes"):
                topk_ids.notes["rows"] = hidden.shape[0]
            else:
                topk_ids = topk_ids.clamp(min=0)
            return super().parts(hidden, topk_weights, topk_ids, layer=layer)

    return replace(program, kernel=Leaking)


def shared_buffer(program: Components, site: Site) -> Components:
    """Every low-latency call lands in receive buffer 0."""

    def wrap(backend: Any) -> Any:
        backend.buffer.buffer_of = lambda call: 0
        return backend

    return replace(program, prepare_finalize=wrap)


class _Swapped:
    """A group on which two neighbouring exchanges of one rank change places."""

    def __init__(self, inner: Any, at: int) -> None:
        self._inner = inner
        self._at = at
        self._seen = 0
        self._kept: tuple[Any, ...] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def all_to_all_single(self, *args: Any) -> None:
        if self._inner.world.capture is not None:  # the replays launch it
            self._inner.all_to_all_single(*args)
            return
        seen, self._seen = self._seen, self._seen + 1
        if seen == self._at:
            self._kept = args
            return
        self._inner.all_to_all_single(*args)
        if self._kept is not None:
            kept, self._kept = self._kept, None
            self._inner.all_to_all_single(*kept)


def swap_collectives(program: Components, site: Site) -> Components:
    def wrap(backend: Any) -> Any:
        backend.group = _Swapped(backend.group, site.at)
        return backend

    return replace(program, prepare_finalize=wrap)


def straddling_requests(run: CleanRun) -> Iterator[Site]:
    """Ranks with a request that lies in two slices of a split step, and each field that slicing adjusts there."""
    ranks = set()
    for record in run.split_slices:
        queries = [part["num_reqs"] for part in record.attrs["ubatches"]]
        if sum(queries) > record.attrs["parent"]["num_reqs"]:
            ranks.add(record.rank)
    yield from (Site(rank=rank, field=field) for rank in sorted(ranks) for field in ADJUSTED_FIELDS)


def padded_ranks(run: CleanRun) -> Iterator[Site]:
    """Ranks that run more rows than they have tokens in some step: they were padded, or idle while others ran.

    The peers of a DCP group dispatch shares of one batch, and the trace counts real rows by batch.
    """
    ranks = set()
    size = run.trace.meta.get("config", {}).get("decode_context_parallel_size", 1)
    for rank, record in run.decisions if size == 1 else ():
        if record.attrs["column"]["real_tokens"] < record.attrs["decision"]["num_tokens_padded"][rank]:
            ranks.add(rank)
    yield from (Site(rank=rank) for rank in sorted(ranks))


def neighbouring_exchanges(run: CleanRun) -> Iterator[Site]:
    """Any exchange of a rank that another one of the same step follows.

    The last one of a step changes places with nothing: its rank waits for the step's tokens before the next comes.
    """
    for rank in run.ranks:
        steps = [record.step for record in run.exchanges(rank)]
        pairs = zip(steps, steps[1:], strict=False)
        yield from (Site(rank=rank, at=at) for at, (step, following) in enumerate(pairs) if step == following)


FAULTS = (
    Fault(
        name="whole-metadata",
        sentence="one metadata field of the slices is left whole",
        id="metadata-slice",
        plant=whole_metadata,
        needs="a split step in which a request of that rank lies in two slices",
        sites=straddling_requests,
        keys=("rank", "field"),
    ),
    Fault(
        name="padding-leak",
        sentence="padding rows are dispatched",
        id="padding-leak",
        plant=padding_leak,
        needs="a step in which the rank runs more rows than it has tokens, and no DCP group",
        sites=padded_ranks,
        backends=("deepep_low_latency",),
        keys=("rank",),
        defaults={"rank": 0},
        split=False,
    ),
    Fault(
        name="shared-buffer",
        sentence="calls of both ubatches land in one receive buffer",
        id="buffer-reuse",
        plant=shared_buffer,
        needs="a split step",
        sites=every_split_rank,
        backends=("deepep_low_latency",),
        everywhere=True,
        keys=(),
    ),
    Fault(
        name="swap-collectives",
        sentence="two exchanges change places on one rank",
        id="collective-mismatch",
        plant=swap_collectives,
        needs="an exchange that another one of the same step follows",
        sites=neighbouring_exchanges,
        backends=("nccl",),
        keys=("rank", "at"),
        split=False,
    ),
)
