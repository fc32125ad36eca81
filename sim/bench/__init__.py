"""Benchmarks of the simulator; the product imports none of them.

suite  what `dbo bench sim` times: switches, the ring
"""
