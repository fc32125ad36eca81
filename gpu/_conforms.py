"""The world of processes keeps the world's contract: mypy holds each class against its protocol here. Nothing runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from dbo.contract import world as contract
    from gpu.device import GpuWorld
    from gpu.graph import CudaGraph
    from gpu.group import DistGroup
    from gpu.host.greenlets import GreenletBarrier, GreenletBaton, GreenletHost
    from gpu.host.threads import RawBaton, ThreadBarrier, ThreadHost
    from gpu.host.workers import RankWorker
    from gpu.record.recorder import RankRecorder
    from gpu.streams import CudaEvent, CudaStream, HostEvent, HostStream
    from gpu.tensors import DeviceTensors

    def world(it: GpuWorld) -> contract.World:
        return it

    def streams(host: HostStream, cuda: CudaStream) -> tuple[contract.Stream, contract.Stream]:
        return host, cuda

    def events(host: HostEvent, cuda: CudaEvent) -> tuple[contract.Event, contract.Event]:
        return host, cuda

    def group(it: DistGroup) -> contract.Group:
        return it

    def graph(it: CudaGraph) -> contract.Graph:
        return it

    def hosts(threads: ThreadHost, greenlets: GreenletHost) -> tuple[contract.Host, contract.Host]:
        return threads, greenlets

    def batons(threads: RawBaton, greenlets: GreenletBaton) -> tuple[contract.Baton, contract.Baton]:
        return threads, greenlets

    def barriers(threads: ThreadBarrier, greenlets: GreenletBarrier) -> tuple[contract.Barrier, contract.Barrier]:
        return threads, greenlets

    def worker(it: RankWorker) -> contract.Worker:
        return it

    def recorder(it: RankRecorder) -> contract.Recorder:
        return it

    def tensors(it: DeviceTensors) -> contract.TorchTensors[torch.Tensor]:
        return it
