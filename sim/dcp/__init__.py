"""Decode context parallelism on the simulated machine: the group's collectives, symbols, and the direct path.

build    makes a rank's end of its DCP group, in either mode
fabric   what all ranks share of the direct path: regions with two parities
numeric  the exchange of a DCP group on simulated tensors
"""
