"""The parts of `python -m gpu.check`, one module each: what is run, and when it has passed.

A part is a function of a `Setup` (and of a backend, where it is run for each) that returns whether it has passed and what
there is to say: a line for the table, and more lines where there is more to say.

__main__        `python -m gpu.check`
command         everything that can be checked on this machine's devices, and a short table
dcp_exchange    checks and times the DCP exchange over NCCL
dcp_kernels     the DCP kernels and the direct path on a device
dcp_model       whole steps on DCP groups, in processes, against one rank that has all keys
leftovers       what a raising ubatch or a failed capture leaves behind, and what the same process does next
linearity       is a device's trace a linearisation of the partial order that the schedule promises? No torch
planted_faults  small planted faults for runs on devices: `python -m gpu.check` must see its own watchdog bark
runs            parts `conformance`, `job`, `graph`, `soak`: the contract, and whole runs compared with others
setup           what the parts of the check are told, and the jobs that they run
soak            long runs on devices: the same requests with and without DBO, memory and threads watched
trace           a run's trace is a linearisation, planted faults are found in it, and replays wake nobody
virtual_rank    virtual ranks of the direct path: inputs whose results are known, and rounds
watchdog        runs that a planted fault hangs or kills are ended in time, and the report names where
"""
