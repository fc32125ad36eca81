"""Decode context parallelism on the simulated machine: the group's collectives, symbols, and the direct path."""
