"""What compute costs beside exchanges of its own rank: the SMs that their kernels hold, the bandwidth that copies take.

An operation runs at the rate (N - S) / N while exchanges hold S of the device's N SMs, spinning for peers included, and at
1 / `CostTable.copy_engine_slowdown` while a copy engine sends. At least one SM's worth is left to it, so that what is
slowed still ends and no order depends on the price. Exchanges do not slow each other, and the two halves of low latency
are not priced: nobody has measured how many SMs they take.

Rescaled, not computed when an operation starts: an exchange may begin while the operation runs, at a time that its peers
and a host which has not issued it yet decide, and it ends when they come. So an operation beside exchanges stays open
until its end, and each change of what its rank's exchanges hold moves that end: exact, for one more entry in the engine's
heap an operation and one a change. A rank pays for it from the first exchange that it issues; one that computes, or only
uses low latency, pays nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sim.cost import CostTable
    from sim.engine import Node


class Paced:
    """An operation that runs beside exchanges.

    Attributes:
        left_us: of its time alone, at `since_us`.
        written: whether its record is in the trace; it is, unless the operation acts at its end.
    """

    __slots__ = ("left_us", "since_us", "written")

    def __init__(self, left_us: float, since_us: float, written: bool) -> None:
        self.left_us = left_us
        self.since_us = since_us
        self.written = written


class Crowd:
    """One rank's exchanges under way, and its operations beside them.

    Args:
        num_sms: of the device.
    """

    __slots__ = ("cost", "num_sms", "sms", "copies", "rate", "running")

    def __init__(self, cost: CostTable, num_sms: int) -> None:
        self.cost = cost
        self.num_sms = num_sms
        self.running: list[Node] = []
        self.reset()

    def reset(self) -> None:
        """Nothing is under way."""
        self.sms = self.copies = 0
        self.rate = 1.0
        self.running.clear()

    def start(self, node: Node, at_us: float) -> None:
        """`node` runs from `at_us` on; sets its `end_us`, for as long as nothing changes."""
        left_us = node.record.dur_us
        node.paced = Paced(left_us, at_us, node.finish is None)
        if self.rate < 1.0:
            _end_at(node, at_us + left_us / self.rate)
        self.running.append(node)

    def change(self, sms: int, copies: int, at_us: float) -> list[Node]:
        """Exchanges take or give back SMs and copy engines. Returns the operations whose ends have moved."""
        self.sms += sms
        self.copies += copies
        rate = max(1, self.num_sms - self.sms) / self.num_sms
        if self.copies:
            rate /= self.cost.copy_engine_slowdown
        before, self.rate = self.rate, rate
        if rate == before:
            return []
        for node in self.running:
            paced = node.paced
            assert paced is not None
            paced.left_us = max(0.0, paced.left_us - (at_us - paced.since_us) * before)
            paced.since_us = at_us
            _end_at(node, at_us + paced.left_us / rate)
        return self.running


def _end_at(node: Node, end_us: float) -> None:
    """Also the record's duration, so that start and duration add up to the very end that others wait for.

    In whole nanoseconds, as all of the cost table is: then a trace that was written to a file has the same times.
    """
    record = node.record
    record.dur_us = round(end_us - record.t_us, 3)
    node.end_us = record.t_us + record.dur_us
