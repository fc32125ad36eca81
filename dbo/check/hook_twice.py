"""hook-twice: a receive hook runs more than once."""

from __future__ import annotations

from dbo.check import hooks
from dbo.check.happens import HappensBefore
from dbo.check.hooks import hooks_of
from dbo.check.violation import Findings
from dbo.trace import Trace, kinds

ID = "hook-twice"
SENTENCE = "a receive hook runs a second time, and takes data that belongs to a later exchange"
UNIT = "registered hooks"
READS = hooks.READS
NEEDS = (kinds.HOOK_REGISTER,)


def detect(trace: Trace, happens: HappensBefore) -> Findings:
    """Counts the runs of every registered hook."""
    found = Findings(ID)
    for hook in hooks_of(trace):
        found.checked += 1
        if len(hook.runs) > 1:
            again = hook.runs[1]
            found.violate(
                f"hook {hook.number} of ubatch {hook.owner} (rank {again.rank}, step {again.step}) ran "
                f"{len(hook.runs)} times, the second time in ubatch {again.attrs.get('runner', again.ubatch)}",
                again,
                hook.runs[0].id,
                ubatch=hook.owner,
            )
    return found
