"""empty-ubatch: a rank runs a ubatch without a real token."""

from __future__ import annotations

from dbo.check.happens import HappensBefore
from dbo.check.violation import Findings, need
from dbo.trace import Trace, kinds

ID = "empty-ubatch"
SENTENCE = "a rank runs a ubatch that holds no real token"
UNIT = "ubatches"
READS = (kinds.SLICES,)
NEEDS = (kinds.SLICES,)


def detect(trace: Trace, happens: HappensBefore) -> Findings:
    """Looks at every slice of every split step."""
    found = Findings(ID)
    for record in trace.of_kind(kinds.SLICES):
        ubatches = need(record, "ubatches")
        if len(ubatches) < 2:
            continue
        for index, ubatch in enumerate(ubatches):
            found.checked += 1
            if ubatch["num_actual_tokens"] == 0:
                total = need(record, "parent")["num_actual_tokens"]
                found.violate(
                    f"ubatch {index} of rank {record.rank} has no real token in step {record.step} ({total} real "
                    f"tokens in {len(ubatches)} ubatches of {_rows(ubatches)} rows): no rank may split this step",
                    record,
                    ubatch=index,
                )
    return found


def _rows(ubatches: list[dict[str, int]]) -> str:
    return " + ".join(str(ubatch["num_tokens_padded"]) for ubatch in ubatches)
