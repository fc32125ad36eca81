"""Benchmarks of the simulator; the product imports none of them."""
