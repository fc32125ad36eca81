"""Faults of a DCP group: exchanges left out or in another order, signals, regions, lengths, and the merge's weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from dbo.batch.plan import DCPLayout
from dbo.batch.slicing import slice_plan
from dbo.engine.components import Components
from dbo.trace import Record, kinds
from sim.faults import dcp_group as faults
from sim.faults.clean_run import CleanRun
from sim.faults.fault import Fault, Site

COLLECTIVES = ("a2a", "ag_rs")
DIRECT = ("a2a_direct",)
ANY = (*COLLECTIVES, *DIRECT)

_OPERATIONS = ("all_to_all_single", "all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce")
_BITS_OF_E = 1 / np.log(2.0)


class _Through:
    """A group seen through a fault: `launch(number, call)` decides what becomes of each collective.

    Calls inside a capture go their way uncounted: what they launch is launched by the replays.
    """

    def __init__(self, inner: Any, launch: Callable[[int, Callable[[], None]], None]) -> None:
        self._inner, self._launch, self._seen = inner, launch, 0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if name not in _OPERATIONS:
            return found

        def call(output: Any, input: Any) -> None:
            if self._inner.world.capture is not None:
                found(output, input)
                return
            seen, self._seen = self._seen, self._seen + 1
            self._launch(seen, lambda: found(output, input))

        return call


def _seen_through(program: Components, launch: Callable[[int, Callable[[], None]], None]) -> Components:
    def wrap(group: Any) -> Any:
        group.group = _Through(group.group, launch)
        return group

    return faults.plant(wrap, program)


def skip_exchange(program: Components, site: Site) -> Components:
    """One rank leaves one collective of its group out."""

    def launch(number: int, call: Callable[[], None]) -> None:
        if number != site.at:
            call()

    return _seen_through(program, launch)


def swap_exchanges(program: Components, site: Site) -> Components:
    """One collective of a rank comes after the next one of its group."""
    kept: list[Callable[[], None]] = []

    def launch(number: int, call: Callable[[], None]) -> None:
        if number == site.at:
            kept.append(call)
            return
        call()
        if kept:
            kept.pop()()

    return _seen_through(program, launch)


def local_length(program: Components, site: Site) -> Components:
    """A peer's own length of every request with keys there is one too short in the slices."""

    def careless(plan: Any, piece: Any, *args: Any, **kwargs: Any) -> Any:
        part = slice_plan(plan, piece, *args, **kwargs)
        assert part.dcp_local_seq_lens is not None
        return dataclasses.replace(part, dcp_local_seq_lens=np.maximum(part.dcp_local_seq_lens - 1, 0))

    return replace(program, slice_plan=careless)


def missing_signal(program: Components, site: Site) -> Components:
    return faults.plant(faults.missing_flag, program)


def stale_signal(program: Components, site: Site) -> Components:
    return faults.plant(faults.stale_flag, program)


def wrong_parity(program: Components, site: Site) -> Components:
    return faults.plant(faults.wrong_parity, program)


def one_region(program: Components, site: Site) -> Components:
    """All ubatches of a rank exchange in the regions of ubatch 0, and count their epochs together."""

    def wrap(group: Any) -> Any:
        reduce = group.direct.reduce
        group.direct.reduce = lambda *args, ubatch: reduce(*args, ubatch=0)
        return group

    return faults.plant(wrap, program)


def _weighed(program: Components, how: Callable[[Any], Any]) -> Components:
    def wrap(group: Any) -> Any:
        reduce = group.reduce_heads
        group.reduce_heads = lambda out, lse, *mask: reduce(out, how(lse), *mask)
        return group

    return faults.plant(wrap, program)


def equal_weights(program: Components, site: Site) -> Components:
    """The LSE is left out of the merge: shards with keys have one weight. Minus infinity times 0 counts as no key."""
    return _weighed(program, lambda lse: lse * 0)


def other_base(program: Components, site: Site) -> Components:
    """The log-sum-exp is in base 2, and merged as base e."""
    return _weighed(program, lambda lse: lse * _BITS_OF_E)


def empty_shard(program: Components, site: Site) -> Components:
    return faults.plant(faults.zero_lse_of_empty_shards, program)


# -- where a clean run offers them ------------------------------------------------------------------------------------


def neighbours(fits: Callable[[Record, Record], bool]) -> Callable[[CleanRun], Iterator[Site]]:
    """Collectives of a rank's group that another one of the same step follows, where the two fit."""

    def sites(run: CleanRun) -> Iterator[Site]:
        for rank in run.ranks:
            found = run.exchanges(rank, "dcp")
            for at, (first, second) in enumerate(pairwise(found)):
                if first.step == second.step and fits(first, second):
                    yield Site(rank=rank, at=at)

    return sites


def _of_one_attention(first: Record, second: Record) -> bool:
    """No wait for a peer lies between them: the rank comes to the second one although its peers are at the first."""
    one, other = ((r.ubatch, r.layer, r.point) for r in (first, second))
    return one == other and first.attrs["op"] != second.attrs["op"]


def _of_two_ubatches(first: Record, second: Record) -> bool:
    return first.ubatch != second.ubatch


def _exchange_and_sum(first: Record, second: Record) -> bool:
    return _of_one_attention(first, second) and second.attrs["op"] == "all_reduce"


def ranks_with_local_keys(run: CleanRun) -> Iterator[Site]:
    """Ranks that hold a key of a request of some split step."""
    found = {r.rank for r in run.split_slices for part in r.attrs["ubatches"] if any(part["dcp_local_seq_lens"] or ())}
    yield from (Site(rank=rank) for rank in sorted(found))


def exchanging_ranks(run: CleanRun) -> Iterator[Site]:
    """Ranks that exchange by signals."""
    yield from (Site(rank=rank) for rank in sorted({r.rank for r in _merges(run)}))


def ranks_that_exchange_again(run: CleanRun) -> Iterator[Site]:
    """Ranks that exchange by signals more than once for one ubatch: the first signals are never stale."""
    found = {r.rank for r in _merges(run) if any(epoch > 1 for _, epoch in r.attrs["expects"].values())}
    yield from (Site(rank=rank) for rank in sorted(found))


def ranks_with_two_regions(run: CleanRun) -> Iterator[Site]:
    """Ranks of which more than one ubatch exchanges by signals."""
    found = {r.rank for r in _merges(run) if any(ubatch > 0 for ubatch, _ in r.attrs["expects"].values())}
    yield from (Site(rank=rank) for rank in sorted(found))


def _merges(run: CleanRun) -> list[Record]:
    return [r for r in run.trace.of_kind(kinds.OP) if r.name == "dcp.direct.merge"]


def unequal_shards(run: CleanRun) -> Iterator[Site]:
    """Once, if a token is sampled whose keys lie on all peers, in different numbers."""
    if any(0 < min(counts) < max(counts) for _, counts in _sampled(run)):
        yield Site()


def ranks_with_an_empty_shard(run: CleanRun) -> Iterator[Site]:
    """Ranks without a key of a request of which a token is sampled."""
    found = {record.rank for record, counts in _sampled(run) if not counts[record.rank % len(counts)]}
    yield from (Site(rank=rank) for rank in sorted(found))


def _sampled(run: CleanRun) -> Iterator[tuple[Record, list[int]]]:
    """Keys by peer of each request of the split steps in which every request gets a token. Only runs with numbers."""
    if run.trace.meta.get("mode") != "numeric":
        return
    rows = {(r.rank, r.step): r.attrs["rows"] for r in run.trace.of_kind(kinds.STEP_END) if r.attrs["status"] == "ok"}
    for record in run.split_slices:
        plan = record.attrs["parent"]
        lens = [n for n in plan["seq_lens"] if n]
        if plan["dcp_layout"] is None or rows.get((record.rank, record.step)) != len(lens):
            continue
        layout = DCPLayout(**plan["dcp_layout"])
        peers = [replace(layout, rank=peer).local_seq_lens(np.array(lens)) for peer in range(layout.size)]
        yield from ((record, [int(n) for n in counts]) for counts in zip(*peers, strict=True))


_FOLLOWED = "an exchange of the group that another one of the same step follows"
_SIGNALS = "an exchange by signals"
_AGAIN = "a second exchange by signals of one ubatch"

FAULTS = (
    Fault(
        name="dcp-skip-exchange",
        sentence="a rank leaves an exchange of heads out",
        id="collective-mismatch",
        plant=skip_exchange,
        needs="an exchange of heads that another one of the group follows in the same attention",
        sites=neighbours(_of_one_attention),
        exchanges=COLLECTIVES,
        keys=("rank", "at"),
        split=False,
    ),
    Fault(
        name="dcp-swap-ubatches",
        sentence="two ubatches exchange in another order on one rank of a DCP group",
        id="collective-mismatch",
        plant=swap_exchanges,
        needs=f"{_FOLLOWED}, for another ubatch",
        sites=neighbours(_of_two_ubatches),
        exchanges=ANY,
        keys=("rank", "at"),
        also=("deadlock",),  # where the rank waits for a peer before it comes to the other exchange
    ),
    Fault(
        name="dcp-late-exchange",
        sentence="a rank exchanges heads after the sum that needs them",
        id="collective-mismatch",
        plant=swap_exchanges,
        needs="an exchange of heads that a sum of the group follows",
        sites=neighbours(_exchange_and_sum),
        exchanges=COLLECTIVES,
        keys=("rank", "at"),
        split=False,
    ),
    Fault(
        name="dcp-local-length",
        sentence="the slices count one key too few on a rank of a DCP group",
        id="metadata-slice",
        plant=local_length,
        needs="a split step with a request that has a key on that rank",
        sites=ranks_with_local_keys,
        exchanges=ANY,
        keys=("rank",),
    ),
    Fault(
        name="dcp-missing-signal",
        sentence="a rank of a DCP group never signals its peers",
        id="deadlock",
        plant=missing_signal,
        needs=_SIGNALS,
        sites=exchanging_ranks,
        exchanges=DIRECT,
        keys=("rank",),
        split=False,
    ),
    Fault(
        name="dcp-stale-signal",
        sentence="a merge takes the signals of the exchange before for its own",
        id="stream-race",
        plant=stale_signal,
        needs=_AGAIN,
        sites=ranks_that_exchange_again,
        exchanges=DIRECT,
        keys=("rank",),
        split=False,
    ),
    Fault(
        name="dcp-wrong-region",
        sentence="a rank pushes to its peers' region of the next exchange",
        id="buffer-reuse",
        plant=wrong_parity,
        needs=_AGAIN,
        sites=ranks_that_exchange_again,
        exchanges=DIRECT,
        keys=("rank",),
        split=False,
    ),
    Fault(
        name="dcp-one-region",
        sentence="both ubatches of a rank exchange in one region",
        id="deadlock",
        plant=one_region,
        needs="exchanges by signals of two ubatches",
        sites=ranks_with_two_regions,
        exchanges=DIRECT,
        keys=("rank",),
    ),
    Fault(
        name="dcp-no-lse",
        sentence="the LSE is left out of the merge",
        id="numeric",
        plant=equal_weights,
        needs="a split step of a run with numbers whose tokens have keys on all peers, in different numbers",
        sites=unequal_shards,
        exchanges=ANY,
        everywhere=True,
        keys=(),
        numeric=True,
    ),
    Fault(
        name="dcp-lse-base",
        sentence="the LSE of base 2 is merged as base e",
        id="numeric",
        plant=other_base,
        needs="a split step of a run with numbers whose tokens have keys on all peers, in different numbers",
        sites=unequal_shards,
        exchanges=ANY,
        everywhere=True,
        keys=(),
        numeric=True,
    ),
    Fault(
        name="dcp-empty-shard",
        sentence="a rank without keys weighs as much as one key",
        id="numeric",
        plant=empty_shard,
        needs="a split step of a run with numbers and a token without keys on that rank",
        sites=ranks_with_an_empty_shard,
        exchanges=ANY,
        keys=("rank",),
        numeric=True,
    ),
)
