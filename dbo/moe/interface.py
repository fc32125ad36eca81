"""What an all-to-all backend and an expert kernel owe each other: `FusedMoEPrepareAndFinalizeModular` and `Experts`.

Shapes: T tokens of this (u)batch, H hidden size, K experts a token (top-k), E experts, R ranks, L = E / R local experts,
M rows that one expert can receive. Arrays are torch tensors (numeric, devices) or `sim.symbols.Symbol` (ordering mode);
this module needs neither.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

Receiver = Callable[[], Any]
RecvHook = Callable[[], None]


@dataclass(frozen=True, kw_only=True)
class ExpertInputs:
    """Rows that arrived at this rank's experts.

    Attributes:
        layout: "batched": `x_LMH` `[L, M, H]` with `counts_L` `[L]` valid rows an expert, weights applied in combine;
            "flat": `x_NH` `[N, H]` with `topk_ids` `[N, K]` (local expert index, -1: not here) and `topk_weights`
            `[N, K]` fp32, applied by the experts, which return the weighted sum over K.
        x, counts, topk_ids, topk_weights: as above; None where the layout has none.
    """

    layout: str
    x: Any
    counts: Any = None
    topk_ids: Any = None
    topk_weights: Any = None


@dataclass(frozen=True, kw_only=True)
class PartialSums:
    """What combine brought where nothing has been added up yet, so that the layer may add more in the same pass.

    Attributes:
        blocks: by rank, that rank's partial sums `[., H]`. Only valid until this (u)batch's next dispatch.
        places: `[R, T]` the row of token t in a rank's block, -1: none.
        reduce: `(blocks, places)` to their sum `[T, H]`, over the ranks in order, in fp32.
    """

    blocks: tuple[Any, ...]
    places: Any
    reduce: Callable[[Any, Any], Any]

    def summed(self) -> Any:
        """`[T, H]`, made on the current stream."""
        return self.reduce(self.blocks, self.places)


def summed(combined: Any) -> Any:
    """What combine's receiver returned, as `[T, H]`."""
    return combined.summed() if isinstance(combined, PartialSums) else combined


class Experts(Protocol):
    """The routed experts of one layer on one rank."""

    def apply(self, inputs: ExpertInputs) -> Any:
        """Batched: `[L, M, H]`, rows past the count undefined. Flat: `[N, H]`, weighted and summed over K."""


class FusedMoEPrepareAndFinalizeModular(Protocol):
    """One all-to-all backend on one rank. Called by the modular kernel, in the thread that runs the layer.

    `prepare_async` and `finalize_async` start an exchange on the current stream and return either a receiver, or
    (hook, receiver). With a hook, the hook must run before the receiver is called; it may run in the peer's thread.
    Padding rows have expert id -1 and are never dispatched. A rank with zero rows still takes part.
    """

    layout: str

    def prepare_async(self, a1: Any, topk_weights: Any, topk_ids: Any) -> Receiver | tuple[RecvHook, Receiver]:
        """Dispatch `a1` `[T, H]` by `topk_ids` `[T, K]` int64; the receiver returns `ExpertInputs`."""

    def finalize_async(self, expert_out: Any, topk_weights: Any, topk_ids: Any) -> Receiver | tuple[RecvHook, Receiver]:
        """Send results back; the receiver returns `[T, H]`, or `PartialSums` of it."""

    def copy_out(self, combined: Any) -> Any:
        """Point "copy": fill the layer's own `[T, H]` from what combine's receiver returned, on the current stream."""
