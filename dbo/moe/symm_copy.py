"""Backend `symm_copy`: rows packed by a kernel, moved by copy engines through symmetric memory, announced by signals.

The transfer itself takes no SM, so it does not slow the other ubatch's matrix kernels down; packing, unpacking and the
reduction do take some. Any dtype.

Sizes: eager, only the rows that a peer needs travel, so the host waits for everybody's counts first. With `worst_case`,
every row travels to every peer, zeroed where it has no expert there: sizes follow from the token counts that the ranks have
shared, and nothing is waited for.

Receive regions belong to a *channel*, a ubatch and a half of the layer. Within a channel no barrier is needed: a peer sends
into a region again only after it has received what this rank sent *after* reading the region (a dispatch is answered by its
combine, a combine by the next dispatch). Between the ubatches nothing of that kind holds, hence a region each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from dbo.contract import World
from dbo.forward_context import get_forward_context
from dbo.moe.cross_stream import CrossStream
from dbo.moe.interface import ExpertInputs, Receiver
from dbo.ubatch import dbo_current_ubatch_id

Channel = tuple[int, str]


class Arrival(Protocol):
    """What peers are sending to this rank in one exchange."""

    def wait(self) -> tuple[Any, ...]:
        """Queue on the current stream: wait for every peer's signal, copy the rows out; by source rank."""


class SymmetricCopies(Protocol):
    """Symmetric memory of one rank, and the copy engines that write into its peers'. `World.symmetric`."""

    def exchange_counts(self, counts: Any, *, channel: Channel) -> list[list[int]]:
        """Tell the peers `counts` `[R]` int32, wait **on the host** for theirs: entry [r][p] is what r sends to p."""

    def send(self, arrays: Sequence[Any], mine: Sequence[int], theirs: Sequence[int], *, channel: Channel) -> Arrival:
        """Queue copies behind the current stream: rows of each of `arrays` go to peers by `mine`, come by `theirs`."""


class CopyRows(Protocol):
    """The kernels around the copies. T tokens, R ranks, L local experts, K experts a token, H hidden size."""

    def counts(self, topk_ids: Any, ranks: int, local_experts: int) -> Any:
        """`[R]` int32: tokens of this rank that have an expert on each rank."""

    def pack(
        self, x: Any, topk_weights: Any, topk_ids: Any, ranks: int, local_experts: int, rows: int | None
    ) -> tuple[Any, Any, Any]:
        """Rows by peer: `[N, H]`, `[N, 2 * K]` fp32 (ids local to the peer or -1, weights), places `[R, T]` int64.

        `rows` is their number, known from the counts; None: all R * T, rows without an expert there zeroed. `places[p, t]`
        is the row of token t for peer p, -1 where it has none.
        """

    def unpack(self, routing: Any) -> tuple[Any, Any]:
        """`[N, 2 * K]` fp32 -> ids `[N, K]` int64, weights `[N, K]` fp32."""

    def reduce(self, rows: Any, places: Any) -> Any:
        """`[N, H]` partial sums -> `[T, H]`: over the peers in order of rank, in fp32."""


class SymmCopyPrepareAndFinalize:
    """Dispatch and combine of one rank, for all layers and ubatches.

    Args:
        world: of this rank.
        num_experts: E, over all ranks.
        worst_case: every row to every peer, no counts; graphs need it.
    """

    layout = "flat"

    def __init__(self, world: World, *, num_experts: int, worst_case: bool = False) -> None:
        self.rank, self.ranks = world.rank, world.size
        self.copies: SymmetricCopies = world.symmetric
        self.ops: CopyRows = world.copy_rows
        self.local_experts = num_experts // world.size
        self.worst_case = worst_case
        self._streams = CrossStream(world)
        self._sent: dict[int, tuple[list[int], list[int], Any]] = {}

    def prepare_async(self, a1: Any, topk_weights: Any, topk_ids: Any) -> Receiver:
        self._streams.used_here(a1, topk_weights, topk_ids)
        channel = self._channel("dispatch")
        mine, theirs, total = self._splits(topk_ids, channel)
        rows, routing, places = self.ops.pack(a1, topk_weights, topk_ids, self.ranks, self.local_experts, total)
        arrival = self.copies.send((rows, routing), mine, theirs, channel=channel)
        self._sent[dbo_current_ubatch_id()] = mine, theirs, places

        def receive() -> ExpertInputs:
            x, got_routing = arrival.wait()
            ids, weights = self.ops.unpack(got_routing)
            self._streams.used_by_compute(x, ids, weights)
            return ExpertInputs(layout="flat", x=x, topk_ids=ids, topk_weights=weights)

        return receive

    def finalize_async(self, expert_out: Any, topk_weights: Any, topk_ids: Any) -> Receiver:
        self._streams.used_here(expert_out)
        mine, theirs, places = self._sent.pop(dbo_current_ubatch_id())
        arrival = self.copies.send((expert_out,), theirs, mine, channel=self._channel("combine"))

        def receive() -> Any:
            (got,) = arrival.wait()
            self._streams.used_here(places)
            combined = self.ops.reduce(got, places)
            self._streams.used_by_compute(combined)
            return combined

        return receive

    def copy_out(self, combined: Any) -> Any:
        return self._streams.copy_out(combined)

    def _channel(self, half: str) -> Channel:
        return dbo_current_ubatch_id(), half

    def _splits(self, topk_ids: Any, channel: Channel) -> tuple[list[int], list[int], int | None]:
        """Rows to and from each peer, and the number of packed rows (None: all)."""
        if self.worst_case:
            return [topk_ids.shape[0]] * self.ranks, list(get_forward_context().num_tokens_across_ranks), None
        counts = self.ops.counts(topk_ids, self.ranks, self.local_experts)
        table = self.copies.exchange_counts(counts, channel=channel)
        mine = table[self.rank]
        return mine, [row[self.rank] for row in table], sum(mine)
