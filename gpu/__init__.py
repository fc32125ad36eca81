"""The second world: one process per rank, on devices, or on CPU tensors over gloo for a run without devices.

world      `launch`: the ranks of a run, its watchdog, its trace
process    one rank's process; `device` its `World`
host       batons, barriers, worker threads; `streams`, `tensors`, `group`: the rest of the contract
board      what each rank says about itself in shared memory; `watchdog` reads it from a process of its own
recorder   the trace of one rank; `merge` makes one trace of all
alltoall   what stands behind the backends
graph      full CUDA graphs of a step; `stamp` times their points
probe      what a machine has and lacks
check      `python -m gpu.check`, also under torchrun: the conformance suite, the main job, planted faults, long runs
profiled   a run under torch.profiler; `ranges` names what it sees

Importing the package loads nothing heavy.
"""
