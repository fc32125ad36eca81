"""Benchmarks: what is timed, how, and the table that says which targets are reached.

coordination   all inputs of the DP coordination, up to renaming ranks, judged by what a decision promises
dcp            a DCP group's exchange by every path, checked first, then timed, on real processes
dcp_processes  the ranks of `dbo bench dcp` as processes: inputs, the check against float64, and the timing
frontrun_peer  the two-thread ring under the tool `frontrun`, for a comparison in the same run
moe            what DBO gains on real devices, against its own ideal and the best run without it
moe_figures    what `dbo bench moe` derives from its samples, and which targets that reaches
moe_shapes     the layers that `dbo bench moe` stacks
moe_table      the tables of `dbo bench moe`, as text
ring           a plain ring of two threads       frontrun_peer   … under another tool, where it is installed
table          results as text and JSON                     layer           some MoE layers through the real ring
timing         a benchmark, its target, its samples         coordination    all inputs of the coordination, by symmetry
"""
