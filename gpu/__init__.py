"""The second world: one process per rank, on devices, or on CPU tensors over gloo for a run without devices.

Rooms: `launch` (processes of a run), `host` (batons, barriers, workers), `record` (the trace of a rank), `watch` (the board
and the watchdog), `alltoall` (what stands behind the backends), `dcp` (a DCP group), `kernels` (Triton), `check`
(`python -m gpu.check`), `bench` (what `dbo bench` times on devices).

_conforms  mypy holds each class of this world against the contract
device     one rank's `World`
graph      full CUDA graphs of a step
group      collectives of torch.distributed, numbered and recorded
probe      what a machine has and lacks, backend by backend
streams    streams and events: CUDA's, or ones whose work is done when it is issued
tensors    between numpy and torch tensors, and what a ubatch thread inherits
world      `launch`: the ranks of a run, its watchdog, its trace

Importing the package loads nothing heavy.
"""
