"""What a forward pass may ask for without being handed it: the batch's metadata, the caches, the player of points.

The context is a `ContextVar`, so each ubatch thread sees its own and a task that is not in a step sees none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol


class Player(Protocol):
    """Plays a schedule while a layer's program runs. Called by model code, in the thread that runs the model."""

    def reach(self, point: str, *, layer: int) -> None:
        """The program is about to run `point` of `layer`: do what the schedule puts before it (yield, hook, stream)."""

    def play(self, thunks: dict[str, Any], *, layer: int) -> None:
        """Run the remaining points of an MoE layer in the schedule's order; `thunks` maps point names to callables."""


class SerialPlayer:
    """Plays every layer in program order, without yields: the step that is not split."""

    ORDER = ("D.send", "D.recv", "MLP", "C.send", "S", "C.recv")

    def __init__(self, world: Any = None) -> None:
        self._world = world

    def reach(self, point: str, *, layer: int) -> None:
        if self._world is not None:
            self._world.at_point(point, layer=layer)

    def play(self, thunks: dict[str, Any], *, layer: int) -> None:
        for point in self.ORDER:
            if point in thunks:
                self.reach(point, layer=layer)
                thunks[point]()
        self.reach("", layer=layer)


@dataclass(kw_only=True)
class ForwardContext:
    """One forward pass of one (u)batch.

    Attributes:
        attn_metadata: CommonAttentionMetadata of this (u)batch: the whole batch, or its own slice.
        kv_caches: one paged cache a layer, `[num_blocks, block_size, kv_lora_rank + qk_rope_head_dim]`.
        num_tokens: rows of the inputs, padding included.
        num_real_tokens: rows that carry a request's token; the rest is padding at the end.
        ubatch_slices: set by the runner when the step is split; read by `UBatchWrapper`.
        ubatch: index of the ubatch, 0 when the step is not split.
        player: plays the schedule at the layer's points.
        step: number of the engine step.
        num_tokens_across_ranks: rows that every rank dispatches in this (u)batch, by rank; from the shared decision.
        dcp_size: C; the ranks of a DCP group have the same rows and share them out.
        graph_key: the step runs as a captured graph (`dbo.ubatching.graphs.GraphKey`); None: eager.
        real_tokens: with a graph, the real tokens that this rank dispatches of each (u)batch; the metadata's own counts are
            baked.
    """

    attn_metadata: Any
    kv_caches: Sequence[Any] = ()
    num_tokens: int = 0
    num_real_tokens: int = 0
    ubatch_slices: Any = None
    ubatch_metadata: Sequence[Any] | None = None
    ubatch: int = 0
    player: Player = field(default_factory=SerialPlayer)
    step: int = -1
    num_tokens_across_ranks: Sequence[int] = ()
    dcp_size: int = 1
    graph_key: Any = None
    real_tokens: Sequence[int] = ()


_current: ContextVar[ForwardContext | None] = ContextVar("dbo_forward_context", default=None)


def get_forward_context() -> ForwardContext:
    """The calling task's forward context.

    Raises:
        RuntimeError: called outside a forward pass.
    """
    context = _current.get()
    if context is None:
        raise RuntimeError(
            "a forward context exists only during a forward pass: install one with override_forward_context"
        )
    return context


def set_forward_context(context: ForwardContext | None) -> None:
    """Make `context` current for the calling task until it sets another. Used by the ring, which restores it itself."""
    _current.set(context)


@contextmanager
def override_forward_context(context: ForwardContext) -> Iterator[ForwardContext]:
    """Make `context` current inside the `with` block."""
    token = _current.set(context)
    try:
        yield context
    finally:
        _current.reset(token)
