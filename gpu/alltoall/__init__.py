"""What stands behind the all-to-all backends in processes: real libraries, copy engines, and stand-ins over gloo.

copies            what both kinds of `World.symmetric` do alike
deepep_v1         DeepEP V1 behind `World.low_latency` and `World.high_throughput`
deepep_v2         DeepEP V2 behind `World.elastic`
gloo_copies       `World.symmetric` on CPU tensors, between real processes over gloo
gloo_low_latency  the low-latency exchange on CPU tensors, between real processes over gloo
symm              regions that all ranks of a group can write: torch's symmetric memory, or CUDA IPC
symmetric_copies  `World.symmetric` on devices: copy engines and signals, no kernel
"""
