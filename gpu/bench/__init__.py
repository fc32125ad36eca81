"""Benchmarks on devices; the product imports none of them."""
