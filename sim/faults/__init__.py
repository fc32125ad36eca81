"""Faults to plant with `--inject`: transformations of a program, one file a kind.

agreement  decisions, coordination, padding, configuration
backends   waits around exchanges, captured events, signals, regions, lifetimes
clean_run  what a run without a fault offers to plant one in
data       metadata, padding rows, buffers, order of exchanges
dcp        a DCP group: exchanges, signals, regions, lengths, weights of the merge
dcp_group  faults of a DCP group, planted in one rank's end of it
essential  which waits a program needs: a wait is essential where
fault      what a fault is: a transformation of one rank's program
ring       raises, yields, receive hooks
streams    waits, events, receives read early
"""

from sim.faults import agreement, backends, data, dcp, ring, streams
from sim.faults.fault import Fault, Site

_KINDS = (ring, streams, agreement, data, backends, dcp)
CATALOGUE: tuple[Fault, ...] = tuple(fault for kind in _KINDS for fault in kind.FAULTS)


def catalogue() -> tuple[Fault, ...]:
    """All faults, in the order in which `--inject list` prints them."""
    return CATALOGUE


__all__ = ["CATALOGUE", "Fault", "Site", "catalogue"]
