"""The simulator: ranks, host tasks, streams, events, collectives and memory in virtual time, on any laptop.

Rooms: `alltoall` (what stands behind the backends), `dcp` (a DCP group), `tensors` (torch tensors on device `sim`),
`compiled` (schedules for any number of ranks), `faults` (what `--inject` plants), `bench` (what `dbo bench sim`
times).

_conforms    the simulator keeps the world's contract: mypy holds each class against its protocol here
collectives  communicators of the simulated machine
contention   what compute costs beside exchanges of its own rank
cost         the cost table of the virtual clock: microseconds for launches, kernels and transfers
engine       the devices of all ranks as one dataflow graph in virtual time
graph        full graphs of the simulated machine: a capture keeps the calls that would have launched work
host         what host tasks of a simulated rank synchronise with: baton, barrier, worker
numeric      numeric mode: torch tensors on the simulated device, bound to a rank's streams, clock and trace
streams      streams and events of one simulated rank
stuck        what every blocked line waits for, written into the trace when nothing can move any more
symbols      arrays without values for ordering mode: a buffer, a shape and an item size
tasks        host tasks under one scheduler: greenlets or OS threads
work         what device work is, as one value
world        the simulated machine: a `Cluster` of ranks, and the `World` that each rank's program receives
"""
