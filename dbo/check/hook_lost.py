"""hook-lost: a registered receive hook is overwritten or dropped and never runs."""

from __future__ import annotations

from dbo.check import hooks
from dbo.check.happens import HappensBefore
from dbo.check.hooks import HookHistory, hooks_of, unwound_steps
from dbo.check.violation import Findings
from dbo.trace import Trace, kinds

ID = "hook-lost"
SENTENCE = "a receive hook never runs, so nobody completes the receive"
UNIT = "registered hooks"
READS = (*hooks.READS, kinds.UBATCH_EXIT)
NEEDS = (kinds.HOOK_REGISTER,)


def detect(trace: Trace, happens: HappensBefore) -> Findings:
    """A step that raised may drop its hooks; every other hook runs, unless the run was cut before its holder left."""
    found = Findings(ID)
    hooks, unwound = hooks_of(trace), unwound_steps(trace)
    overwritten = _overwritten(hooks)
    left = {(r.rank, r.step, r.ubatch) for r in trace.of_kind(kinds.UBATCH_EXIT)}
    complete = trace.meta.get("complete", True)
    for hook in hooks:
        record = hook.registered
        found.checked += 1
        if hook.runs or (record.rank, record.step) in unwound:
            continue
        over = overwritten.get(record.id)
        if complete or over or hook.drops or (record.rank, record.step, hook.holder) in left:
            how = f"overwritten by hook {over.number}" if over else "dropped" if hook.drops else "never run"
            found.violate(
                f"hook {hook.number} of ubatch {hook.owner} (rank {record.rank}, step {record.step}), left with ubatch "
                f"{hook.holder}, was {how}: its receive is never completed",
                record,
                *([over.registered.id] if over else [r.id for r in hook.drops]),
                ubatch=hook.owner,
            )
    return found


def _overwritten(hooks: list[HookHistory]) -> dict[int, HookHistory]:
    """For the registration of each hook that was pending when the next one was left with the same holder: that one."""
    pending: dict[tuple[int, int, int], HookHistory] = {}
    over: dict[int, HookHistory] = {}
    for hook in hooks:
        record = hook.registered
        place = (record.rank, record.step, hook.holder)
        before = pending.get(place)
        if before is not None and not any(end.id < record.id for end in (*before.runs, *before.drops)):
            over[before.registered.id] = hook
        pending[place] = hook
    return over
