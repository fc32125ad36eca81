"""Decode context parallelism on the simulated machine: the group's collectives, symbols, and the direct path.

build    makes a rank's end of its DCP group, in either mode
direct   `a2a_direct` on the simulated machine: the protocol of `dbo.dcp.direct`, one tile a source
fabric   what all ranks share of the direct path: regions with two parities
group    the collectives of a DCP group on the simulated machine, over symbols or numbers
numeric  the exchange of a DCP group on simulated tensors
symbols  the exchange of a DCP group in ordering mode
"""
