"""Needs torch. The stack of layers that `dbo bench moe` times, over any backend, and every way to run it.

Layers are the model's own (`DecoderLayer`): norms, latent attention, gate, dispatch, routed experts, combine, shared experts.
Only the choice of experts is not the gate's: see `FixedRouter`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from dbo.bench.moe_shapes import MoEShape
from dbo.model.deepseek_v2 import DecoderLayer
from dbo.model.layers import MLP
from dbo.model.layout import checkpoint_shapes, layer_prefix
from dbo.model.router import Router
from dbo.moe.comm_sms import reserved_comm_sms
from dbo.moe.experts import make_experts
from dbo.moe.modular_kernel import FusedMoEModularKernel
from dbo.moe.side_stream import SideStream
from dbo.schedule import Schedule
from dbo.ubatching.forward_context import get_forward_context, override_forward_context
from dbo.ubatching.wrapper import UBatchWrapper
from gpu.bench.moe_batch import RoutedBatch
from gpu.bench.moe_tape import Recorded, Tape, exchange_again

ROUTED_SCALE = 4.0
"""Of the experts' last products: the gate's weights are small, and a wrong exchange must show beside the residual."""


class FixedRouter:
    """The real gate, its work and its weights; the experts are the batch's own draw.

    With the gate's choice, variants that round differently would send some tokens elsewhere, and with random weights a few
    experts would get most of them.
    """

    def __init__(self, router: Router, layer: int) -> None:
        self.router = router
        self.layer = layer

    def __call__(self, hidden: Tensor, padding_rows: Tensor) -> tuple[Tensor, Tensor]:
        topk_weights, _ = self.router(hidden, padding_rows)
        return topk_weights, get_forward_context().attn_metadata.expert_ids[self.layer]


class Layers:
    """Some layers' weights, drawn on the device: experts by rank, everything else the same on all ranks."""

    def __init__(self, world: Any, shape: MoEShape, count: int, *, seed: int) -> None:
        self.world = world
        self._moe: list[tuple[Tensor, Tensor, MLP]] = []
        config = shape.config(count)
        shared = torch.Generator(world.device).manual_seed(seed)
        own = torch.Generator(world.device).manual_seed(seed + 1 + world.rank)

        def draw(generator: torch.Generator, *size: int, scale: float = 1.0) -> Tensor:
            drawn = torch.randn(size, generator=generator, device=world.device, dtype=torch.bfloat16)
            return drawn.mul_(scale)

        weights: dict[str, Tensor] = {}
        for name, size in checkpoint_shapes(config).items():
            if "layers." not in name or ".mlp." in name and "gate.weight" not in name:
                continue
            weights[name] = (
                draw(shared, *size, scale=size[-1] ** -0.5) if len(size) > 1 else 1 + draw(shared, *size) / 8
            )
        hidden, width, both, local = shape.hidden, shape.width, shape.shared, shape.experts // world.size
        for index in range(count):
            mlp = f"{layer_prefix(index)}.mlp"
            weights |= {
                f"{mlp}.experts.gate_up_proj": draw(own, local, 2 * width, hidden, scale=hidden**-0.5),
                f"{mlp}.experts.down_proj": draw(own, local, width, hidden, scale=ROUTED_SCALE * width**-0.5),
                f"{mlp}.shared_experts.gate_up_proj.weight": draw(shared, 2 * both, hidden, scale=hidden**-0.5),
                f"{mlp}.shared_experts.down_proj.weight": draw(shared, hidden, both, scale=both**-0.5),
            }
        self._layers: list[DecoderLayer] = []
        for index in range(count):
            layer = DecoderLayer(config, weights, index, _no_backend, _no_kernel, None)
            layer.router = FixedRouter(layer.router, index)  # type: ignore[assignment]
            self._layers.append(layer)
            mlp = f"{layer_prefix(index)}.mlp"
            routed = weights[f"{mlp}.experts.gate_up_proj"], weights[f"{mlp}.experts.down_proj"]
            self._moe.append((*routed, MLP(weights, f"{mlp}.shared_experts")))

    def over(self, backend_of: Callable[[int], Any]) -> list[DecoderLayer]:
        """The same layers, each over its backend."""
        found = []
        for layer, (gate_up, down, shared) in zip(self._layers, self._moe, strict=True):
            twin, backend = copy.copy(layer), backend_of(layer.index)
            experts = make_experts(backend.layout, gate_up, down)
            twin.kernel = FusedMoEModularKernel(backend, experts, shared, "overlap", SideStream(self.world))
            found.append(twin)
        return found


class _NoBackend:
    layout = "flat"


def _no_backend(*, layer: int) -> Any:
    return _NoBackend


def _no_kernel(**parts: Any) -> Any:
    """Kernels are made per backend."""


class Stack:
    """What the wrapper runs: layer after layer from `inputs_embeds` `[T, H]` to `[T, H]`."""

    def __init__(self, layers: Sequence[DecoderLayer]) -> None:
        self.layers = layers

    def __call__(self, *, inputs_embeds: Tensor) -> Tensor:
        context = get_forward_context()
        metadata, hidden = context.attn_metadata, inputs_embeds
        for layer in self.layers:
            hidden = layer(hidden, metadata.by, metadata.paged, context)
        return hidden


class Runs:
    """Every way to run the first `n` layers of a stack over one backend. Each returns `[T, H]`, or None: exchanges only.

    Args:
        wrapper: of the rank; its threads serve all stacks.
        backend: the real one, `name` in the configuration.
    """

    def __init__(
        self, world: Any, wrapper: UBatchWrapper, layers: Layers, batch: RoutedBatch, name: str, backend: Any
    ) -> None:
        self.world, self.wrapper, self.batch = world, wrapper, batch
        self.name, self.backend = name, backend
        self.tape = Tape(part_of=lambda context: context.attn_metadata.part)
        self._live = layers.over(lambda layer: backend)
        self._recorded = layers.over(lambda layer: Recorded(backend, self.tape, layer))
        self._step = 0

    def no_dbo(self, n: int) -> Tensor:
        return self._whole(self._live[:n])

    def dbo(self, n: int, schedule: Schedule) -> Tensor:
        self._set(self._live[:n], schedule)
        with override_forward_context(self.batch.split(self._next_step())):
            return self.wrapper(inputs_embeds=self.batch.hidden)

    def serial(self, n: int) -> Tensor:
        """The two ubatches one after the other, with real exchanges: what DBO must be equal to."""
        return self._halves(self._live[:n])

    def compute(self, n: int) -> Tensor:
        return self._whole(self._recorded[:n])

    def compute_halves(self, n: int) -> Tensor:
        return self._halves(self._recorded[:n])

    def comm(self, n: int) -> None:
        exchange_again(self.backend, self.tape, [self.batch.unsplit(self._next_step())], n)

    def comm_halves(self, n: int) -> None:
        exchange_again(self.backend, self.tape, self.batch.halves(self._next_step()), n)

    def record(self, n: int) -> None:
        """Fill the tape, for the whole batch and for both halves."""
        with self.tape.records():
            self.compute(n)
            self.compute_halves(n)

    def _whole(self, layers: Sequence[DecoderLayer]) -> Tensor:
        self._set(layers)
        with override_forward_context(self.batch.unsplit(self._next_step())):
            return self.wrapper(inputs_embeds=self.batch.hidden)

    def _halves(self, layers: Sequence[DecoderLayer]) -> Tensor:
        self._set(layers)
        with override_forward_context(self.batch.split(self._next_step())):
            return self.wrapper.run_serially(inputs_embeds=self.batch.hidden)

    def _set(self, layers: Sequence[DecoderLayer], schedule: Schedule | None = None) -> None:
        wrapper = self.wrapper
        wrapper.model, wrapper.moe_layers, wrapper.backend = Stack(layers), tuple(range(len(layers))), self.name
        wrapper.schedule = schedule or wrapper.schedule

    def _next_step(self) -> int:
        self._step += 1
        self.world.in_ubatch(-1, step=self._step)
        return self._step


@contextmanager
def comm_sms(backend: Any, sms: int) -> Iterator[None]:
    """Have all exchanges use `sms` SMs, those of unsplit steps too; 0: what the backend takes by itself."""
    buffer = getattr(backend, "buffer", None)
    if not sms or buffer is None:
        yield
        return
    before = backend.comm_sms
    backend.comm_sms = sms
    try:
        if hasattr(buffer, "set_num_sms"):
            with reserved_comm_sms(buffer, sms):
                yield
        else:
            backend.buffer = _WithSms(buffer, sms)
            yield
    finally:
        backend.comm_sms, backend.buffer = before, buffer


class _WithSms:
    """A buffer whose calls are told their SMs; ones that leave it to the library get so many."""

    def __init__(self, buffer: Any, sms: int) -> None:
        self._buffer, self._sms = buffer, sms

    def __getattr__(self, name: str) -> Any:
        return getattr(self._buffer, name)

    def dispatch(self, *args: Any, num_sms: int = 0, **options: Any) -> Any:
        return self._buffer.dispatch(*args, num_sms=num_sms or self._sms, **options)

    def combine(self, *args: Any, num_sms: int = 0, **options: Any) -> Any:
        return self._buffer.combine(*args, num_sms=num_sms or self._sms, **options)
