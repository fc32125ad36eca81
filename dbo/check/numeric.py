"""numeric: a number is further from its reference than it may be.

Whoever computes both writes the comparison into the trace. Comparisons that vary only what padding holds say whether
padding leaks, and belong to `dbo.check.padding_leak`.
"""

from __future__ import annotations

from dbo.check.happens import HappensBefore
from dbo.check.violation import Findings, need
from dbo.trace import Trace, kinds

ID = "numeric"
SENTENCE = "a result differs from its reference by more than it may"
UNIT = "comparisons with a reference"
READS = (kinds.NUMERIC,)
NEEDS = (kinds.NUMERIC,)


def detect(trace: Trace, happens: HappensBefore) -> Findings:
    """Each comparison by itself; an error that is not a number is too large."""
    found = Findings(ID)
    for record in trace.of_kind(kinds.NUMERIC):
        if "varied" in record.attrs:
            continue
        found.checked += 1
        error, limit = float(need(record, "error")), float(need(record, "limit"))
        if not error <= limit:
            found.violate(
                f"{record.name} of rank {record.rank} is off by {error:.3g}, allowed are {limit:.3g}; "
                f"reference: {need(record, 'reference')}",
                record,
            )
    return found
