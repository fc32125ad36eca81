"""The simulator keeps the world's contract: mypy holds each class against its protocol here. Nothing runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from dbo.contract import world as contract
    from sim.collectives import SimGroup
    from sim.graph import SimGraph
    from sim.host import SimBarrier, SimBaton, SimWorker
    from sim.numeric import NumericTensors
    from sim.streams import SimEvent, SimStream
    from sim.symbols import Symbol, SymbolTensors
    from sim.world import SimHost, SimRecorder, SimWorld

    def world(it: SimWorld) -> contract.World:
        return it

    def stream(it: SimStream) -> contract.Stream:
        return it

    def event(it: SimEvent) -> contract.Event:
        return it

    def group(it: SimGroup) -> contract.Group:
        return it

    def graph(it: SimGraph) -> contract.Graph:
        return it

    def host(it: SimHost) -> contract.Host:
        return it

    def baton(it: SimBaton) -> contract.Baton:
        return it

    def barrier(it: SimBarrier) -> contract.Barrier:
        return it

    def worker(it: SimWorker) -> contract.Worker:
        return it

    def recorder(it: SimRecorder) -> contract.Recorder:
        return it

    def numeric_tensors(it: NumericTensors) -> contract.TorchTensors[torch.Tensor]:
        return it

    def symbol_tensors(it: SymbolTensors) -> contract.SymbolicTensors[Symbol]:
        return it
