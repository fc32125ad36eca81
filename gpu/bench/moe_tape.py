"""Needs torch. An exchange that hands back what a real one brought: what is left of a layer is its computation alone.

A first pass goes through the real backend and keeps clones of everything that is sent and received, by layer and (u)batch.
Later passes get the clones and send nothing. The sent half is enough to make the exchanges again without the layers
between them: the communication alone.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from dbo.errors import DBOError
from dbo.moe.interface import ExpertInputs, FusedMoEPrepareAndFinalizeModular, PartialSums, Receiver, RecvHook, summed
from dbo.ubatching.forward_context import ForwardContext, get_forward_context, override_forward_context

Started = Receiver | tuple[RecvHook, Receiver]


@dataclass(kw_only=True)
class Take:
    """One layer's exchanges of one (u)batch.

    Attributes:
        hidden, topk_weights, topk_ids: sent, `[T, H]` and `[T, K]`. arrived: what dispatch brought.
        expert_out: sent back. combined: `[T, H]`, what combine brought.
    """

    hidden: Tensor
    topk_weights: Tensor
    topk_ids: Tensor
    arrived: ExpertInputs | None = None
    expert_out: Tensor | None = None
    combined: Tensor | None = None


@dataclass(kw_only=True)
class Tape:
    """The takes of a stack of layers.

    Attributes:
        part_of: which (u)batch a forward context is; equal for the pass that records and those that replay.
        recording: calls go through, and are kept.
    """

    part_of: Callable[[ForwardContext], Hashable]
    takes: dict[tuple[int, Hashable], Take] = field(default_factory=dict)
    recording: bool = False

    @contextmanager
    def records(self) -> Iterator[None]:
        """Calls inside go to the real backend and are kept."""
        self.recording = True
        try:
            yield
        finally:
            self.recording = False

    def take(self, layer: int) -> Take:
        """What was recorded for `layer` and the (u)batch of the current forward context.

        Raises:
            DBOError: nothing was.
        """
        part = self.part_of(get_forward_context())
        if (layer, part) not in self.takes:
            rule = "a recording is made before it is played"
            raise DBOError.of(rule, fix="run the same (u)batch inside Tape.records", layer=layer, part=part)
        return self.takes[layer, part]


class Recorded:
    """`FusedMoEPrepareAndFinalizeModular` of one layer, over a real backend and a tape."""

    def __init__(self, backend: FusedMoEPrepareAndFinalizeModular, tape: Tape, layer: int) -> None:
        self.backend = backend
        self.tape = tape
        self.layer = layer
        self.layout = backend.layout

    def prepare_async(self, a1: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Started:
        tape = self.tape
        if not tape.recording:
            take = tape.take(self.layer)
            return lambda: take.arrived
        take = Take(hidden=a1.clone(), topk_weights=topk_weights.clone(), topk_ids=topk_ids.clone())
        tape.takes[self.layer, tape.part_of(get_forward_context())] = take

        def keep(arrived: ExpertInputs) -> None:
            take.arrived = _clone(arrived)

        return _watched(self.backend.prepare_async(a1, topk_weights, topk_ids), keep)

    def finalize_async(self, expert_out: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Started:
        take = self.tape.take(self.layer)
        if not self.tape.recording:
            return lambda: take.combined
        take.expert_out = expert_out.clone()

        def keep(combined: Tensor | PartialSums) -> None:
            take.combined = summed(combined) if isinstance(combined, PartialSums) else combined.clone()

        return _watched(self.backend.finalize_async(expert_out, topk_weights, topk_ids), keep)

    def copy_out(self, combined: Tensor) -> Any:
        return self.backend.copy_out(combined)


def exchange_again(
    backend: FusedMoEPrepareAndFinalizeModular, tape: Tape, contexts: list[ForwardContext], layers: int
) -> None:
    """The recorded exchanges of some (u)batches through a backend, layer after layer, with nothing between them."""
    for layer in range(layers):
        for context in contexts:
            with override_forward_context(context):
                take = tape.take(layer)
                # What travels there is the last layer's, but as much, and from where the layer would have written it.
                ask = getattr(backend, "input_buffer", None)
                hidden = None if ask is None else ask(take.hidden)
                finish(
                    backend.prepare_async(take.hidden if hidden is None else hidden, take.topk_weights, take.topk_ids)
                )
                finish(backend.finalize_async(take.expert_out, take.topk_weights, take.topk_ids))


def finish(started: Started) -> Any:
    """Receive what was started, as a step without DBO does."""
    if isinstance(started, tuple):
        hook, receive = started
        hook()
        return receive()
    return started()


def _watched(started: Started, keep: Callable[[Any], None]) -> Started:
    """The same exchange; what its receiver returns is shown to `keep`."""
    hook, receiver = started if isinstance(started, tuple) else (None, started)

    def receive() -> Any:
        received = receiver()
        keep(received)
        return received

    return receive if hook is None else (hook, receive)


def _clone(inputs: ExpertInputs) -> ExpertInputs:
    copies = {
        name: None if value is None else value.clone()
        for name, value in (
            ("x", inputs.x),
            ("counts", inputs.counts),
            ("topk_ids", inputs.topk_ids),
            ("topk_weights", inputs.topk_weights),
        )
    }
    return ExpertInputs(layout=inputs.layout, **copies)
