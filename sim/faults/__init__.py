"""Faults to plant with `--inject`: transformations of a program, one file a kind.

ring       raises, yields, receive hooks
streams    waits, events, receives read early
agreement  decisions, coordination, padding, configuration
data       metadata, padding rows, buffers, order of exchanges
backends   waits around exchanges, captured events, signals, regions, lifetimes
"""

from sim.faults import agreement, backends, data, ring, streams
from sim.faults.fault import Fault, Site

CATALOGUE: tuple[Fault, ...] = (*ring.FAULTS, *streams.FAULTS, *agreement.FAULTS, *data.FAULTS, *backends.FAULTS)


def catalogue() -> tuple[Fault, ...]:
    """All faults, in the order in which `--inject list` prints them."""
    return CATALOGUE


__all__ = ["CATALOGUE", "Fault", "Site", "catalogue"]
