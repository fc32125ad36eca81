"""Benchmarks on devices; the product imports none of them.

dcp          what `dbo bench dcp` asks of devices: kernels, graphs, the direct path
handoff      what a hand-over of the baton costs the host
layer        how far each part of a layer is from the best that torch can do for its shape
layer_parts  the parts of one layer as the model runs them, each beside the best that torch can do
moe          the ranks' program of `dbo bench moe`, and its launcher
moe_batch    the batch of `dbo bench moe`: prompts or decodes of one rank
moe_profile  one pass under the profiler: when bytes were under way between ranks
moe_stack    the stack of layers that `dbo bench moe` times, over any backend, and every way to run it
moe_tape     an exchange that hands back what a real one brought
moe_timing   times of what all ranks do together, in turns
moe_works    what `dbo bench moe` times of one backend
profiled     A run under `torch.profiler`, all of its threads, and its overlap as the profiler saw it
stopwatch    times of device work as a graph replays it, and what the device can do at most, in the same run
"""
