"""What stands behind the backends in the simulator: objects with the real libraries' methods, and their payloads.

copy_numeric      copies through symmetric memory on simulated tensors, and the kernels around them
copy_symbols      copies through symmetric memory in ordering mode: which bytes, no values
deepep_call       what every DeepEP call does about streams, events and counts
elastic           DeepEP V2's `ElasticBuffer` on one node of the simulated machine
flat_numeric      the arithmetic of flat exchanges on simulated tensors
flat_symbols      flat exchanges in ordering mode: which arrays, which bytes, how many rows at most
high_throughput   the normal mode of DeepEP V1's `Buffer` on one node of the simulated machine
low_latency       the low-latency all-to-all of the simulated machine
numeric_payload   the arithmetic of the low-latency exchange on simulated tensors
symmetric         symmetric memory and copy engines of the simulated machine: `dbo.moe.symm_copy.SymmetricCopies`
symmetric_memory  what all ranks of a simulated machine share of symmetric memory
"""
