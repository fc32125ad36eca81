"""Benchmarks: what is timed, how, and the table that says which targets are reached.

timing          a benchmark, its target, its samples         coordination    all inputs of the coordination, by symmetry
table           results as text and JSON                     layer           some MoE layers through the real ring
ring            a plain ring of two threads       frontrun_peer   … under another tool, where it is installed
"""
