"""The second world: one process per rank, on devices, or on CPU tensors over gloo for a run without devices.

world      `launch`: the ranks of a run, its watchdog, its trace
process    one rank's process; `device` its `World`
host       batons, barriers, worker threads; `greenlets`: the same on one thread; `workers`: what both share
streams    with `tensors` and `group`: the rest of the contract
board      what each rank says about itself in shared memory; `watchdog` reads it from a process of its own
recorder   the trace of one rank; `merge` makes one trace of all
alltoall   what stands behind the backends; `symm`: memory that ranks share
dcp_group  a DCP group of ranks; `dcp_direct`: its exchange without a collective
layer      the fused kernels of a layer, in `kernels` and `attention`
graph      full CUDA graphs of a step; `stamp` times their points
probe      what a machine has and lacks
check      `python -m gpu.check`, also under torchrun: the conformance suite, the main job, `planted_faults`, long runs
linearity  whether a run's trace has the order that its schedule promises
dcp_check  the DCP kernels and exchange on one device; `dcp_devices`: on several; `dcp_model`: the model with a group
bench_*    what `dbo bench` times here: `moe` with its `tape` of exchanges, a `layer`, the DCP exchange (`dcp_bench`)
profiled   a run under torch.profiler; `ranges` names what it sees

Importing the package loads nothing heavy.
"""
