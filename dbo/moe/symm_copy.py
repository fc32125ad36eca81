"""Backend `symm_copy`: rows moved by copy engines through symmetric memory, announced by signals.

The transfer itself takes no SM, so it does not slow the other ubatch's matrix kernels down; packing, unpacking and the
reduction do take some. Any dtype.

Sizes: with counts only the rows that a peer needs travel, packed by a kernel, so the host waits for everybody's counts first,
and has queued nothing for the device while it waits. With `worst_case`, every row travels to every peer, straight from where
it is: sizes follow from the token counts that the ranks have shared, nothing is packed and nothing is waited for. Where
nearly every row is needed anyway (`share_needed`) that is the better way in eager steps too.

Receive regions belong to a *channel*, a ubatch and a half of the layer. Within a channel no barrier is needed: a peer sends
into a region again only after it has received what this rank sent *after* reading the region (a dispatch is answered by its
combine, a combine by the next dispatch). Between the ubatches nothing of that kind holds, hence a region each.

That covers what has arrived. A rank's own rows, made where they belong, are read for longer: by the shared experts, while
combine is under way. The peers' next rows lie elsewhere as long as everybody sends as many as before; with other sizes
they may come to lie there. So who changes the sizes of a ubatch lets all ranks end the last step first. The runner does: a
rank waits for its device before it says what it has for the next step, unless nobody wants its rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

from dbo.contract.world import World
from dbo.moe.cross_stream import CrossStream
from dbo.moe.interface import ExpertInputs, PartialSums, Receiver
from dbo.ubatching.forward_context import get_forward_context

Channel = tuple[int, str]
Table = Sequence[Sequence[int]]
"""Rows of one exchange: entry [r][p] is how many r sends to p."""


NEARLY_ALL = 0.9
"""Share of the rows needed from which counting them costs more than sending all: a wait of the host a layer and ubatch, 1.6 ms
on two H200s with 8192 tokens (docs/measurements/dbo_gain.md)."""


def share_needed(*, ranks: int, num_experts: int, top_k: int) -> float:
    """Of a rank's tokens, the share with an expert on one given rank, where experts are chosen evenly."""
    others = num_experts - num_experts // ranks
    return 1.0 - math.comb(others, top_k) / math.comb(num_experts, top_k)


class Arrival(Protocol):
    """What peers are sending to this rank in one exchange; asked for once. Valid until the channel's next exchange."""

    def rows(self) -> tuple[Any, ...]:
        """Queue on the current stream: wait for every peer's signal; each array's rows by source rank, own ones too."""

    def blocks(self) -> tuple[tuple[Any, ...], ...]:
        """As `rows`, but one array a source rank, so that own rows need not be copied."""


class SymmetricCopies(Protocol):
    """Symmetric memory of one rank, and the copy engines that write into its peers'. `World.symmetric`."""

    def reserve(self, *, ubatches: int, rows: int, row_bytes: Sequence[int]) -> None:
        """Make room for exchanges of at most so many rows a rank, of arrays of these widths. Called by all ranks alike."""

    def own_rows(self, like: Any, table: Table, *, channel: Channel) -> Any | None:
        """Where this rank's own rows belong in the arrival of `send(…, to_all=True)`, for whoever makes them: an
        uninitialised array of `like`'s shape and dtype. Rows that are made there are not copied, and stay until some rank
        sends in this channel by another table. None: anywhere."""

    def exchange_counts(self, counts: Any, *, channel: Channel) -> Table:
        """Tell the peers `counts` `[R]` int32, wait **on the host** for theirs."""

    def send(self, arrays: Sequence[Any], table: Table, *, channel: Channel, to_all: bool = False) -> Arrival:
        """Queue copies behind the current stream.

        Rows of each of `arrays` go to the peers one after another, as many as `table` says; with `to_all`, every peer
        gets all of them.
        """


class CopyRows(Protocol):
    """The kernels around the copies. T tokens, R ranks, L local experts, K experts a token, H hidden size.

    Routing `[N, 2 * K]` fp32 is ids over all ranks and weights. `places` `[R, T]` is the row of token t among those that
    peer p gets, -1 where it has no expert there.
    """

    def counts(self, topk_ids: Any, ranks: int, local_experts: int) -> Any:
        """`[R]` int32: tokens of this rank that have an expert on each rank."""

    def pack(
        self, x: Any, topk_weights: Any, topk_ids: Any, ranks: int, local_experts: int, rows: int
    ) -> tuple[Any, Any, Any]:
        """The rows that the peers need, by peer: `[rows, H]`, their routing, and places. `rows` is known from the counts."""

    def route(self, topk_weights: Any, topk_ids: Any, ranks: int, local_experts: int) -> tuple[Any, Any]:
        """Routing of all T tokens, and their places where every peer gets every row."""

    def unpack(self, routing: Any, first_expert: int, local_experts: int) -> tuple[Any, Any]:
        """Routing -> ids `[N, K]` int64 local to this rank, -1 where it has no such expert, and weights `[N, K]` fp32."""

    def reduce(self, blocks: Sequence[Any], places: Any) -> Any:
        """Partial sums `[., H]` by peer -> `[T, H]`: over the peers in order of rank, in fp32."""


class SymmCopyPrepareAndFinalize:
    """Dispatch and combine of one rank, for all layers and ubatches.

    Args:
        world: of this rank.
        num_experts: E, over all ranks.
        worst_case: every row to every peer, no counts. Graphs need it.
    """

    layout = "flat"

    def __init__(self, world: World, *, num_experts: int, worst_case: bool = False) -> None:
        self.rank, self.ranks = world.rank, world.size
        self.copies: SymmetricCopies = world.symmetric
        self.ops: CopyRows = world.copy_rows
        self.local_experts = num_experts // world.size
        self.worst_case = worst_case
        self._streams = CrossStream(world)
        self._sent: dict[int, tuple[Table, Any]] = {}

    def input_buffer(self, like: Any) -> Any | None:
        """Where the layer may write what it will dispatch, of `like`'s shape and dtype, to save a copy; None: anywhere."""
        if not self.worst_case:
            return None
        return self.copies.own_rows(like, self._all_rows(), channel=(_ubatch(), "dispatch"))

    def prepare_async(self, a1: Any, topk_weights: Any, topk_ids: Any) -> Receiver:
        self._streams.used_here(a1, topk_weights, topk_ids)
        channel = _ubatch(), "dispatch"
        if self.worst_case:
            table = self._all_rows()
            routing, places = self.ops.route(topk_weights, topk_ids, self.ranks, self.local_experts)
            rows = a1
        else:
            counts = self.ops.counts(topk_ids, self.ranks, self.local_experts)
            table = self.copies.exchange_counts(counts, channel=channel)
            rows, routing, places = self.ops.pack(
                a1, topk_weights, topk_ids, self.ranks, self.local_experts, sum(table[self.rank])
            )
        arrival = self.copies.send((rows, routing), table, channel=channel, to_all=self.worst_case)
        self._sent[channel[0]] = table, places

        def receive() -> ExpertInputs:
            x, got_routing = arrival.rows()
            ids, weights = self.ops.unpack(got_routing, self.rank * self.local_experts, self.local_experts)
            self._streams.used_by_compute(x, ids, weights)
            return ExpertInputs(layout="flat", x=x, topk_ids=ids, topk_weights=weights)

        return receive

    def finalize_async(self, expert_out: Any, topk_weights: Any, topk_ids: Any) -> Receiver:
        self._streams.used_here(expert_out)
        ubatch = _ubatch()
        table, places = self._sent.pop(ubatch)
        back = [list(column) for column in zip(*table, strict=True)]
        arrival = self.copies.send((expert_out,), back, channel=(ubatch, "combine"))

        def receive() -> PartialSums:
            (blocks,) = arrival.blocks()
            self._streams.used_by_compute(places, *blocks)
            return PartialSums(blocks=blocks, places=places, reduce=self.ops.reduce)

        return receive

    def _all_rows(self) -> Table:
        """Every rank sends every peer all rows."""
        return [[tokens] * self.ranks for tokens in get_forward_context().num_tokens_across_ranks]

    def copy_out(self, combined: Any) -> Any:
        return combined  # the sum is made where it is used, and then belongs to nobody else


def _ubatch() -> int:
    """Whose channel it is; also where the ubatches of a step run one after another: their sizes may differ."""
    return get_forward_context().ubatch
