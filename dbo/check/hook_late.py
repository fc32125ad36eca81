"""hook-late: a receive hook runs after its owner has already launched a reader of what the hook completes."""

from __future__ import annotations

from bisect import bisect_right

from dbo.check import hooks
from dbo.check.happens import HappensBefore
from dbo.check.hooks import HookHistory, hooks_of
from dbo.check.violation import Findings
from dbo.errors import UsageError
from dbo.trace import Record, Trace, kinds
from dbo.trace.accesses import any_overlap

ID = "hook-late"
SENTENCE = "the owner reads what it has received before the hook that receives it has run"
UNIT = "hooks that launched a receive"
READS = (*hooks.READS, kinds.RECV, kinds.TRANSFER)
NEEDS = (kinds.HOOK_REGISTER,)


def detect(trace: Trace, happens: HappensBefore) -> Findings:
    """Between registration and receive, in issue order, the owner may read nothing that the receive writes."""
    found = Findings(ID)
    hooks = [hook for hook in hooks_of(trace) if hook.receives]
    readers: dict[tuple[int, int], list[Record]] = {}
    for record in trace.records:
        if record.reads and record.on_device and record.kind not in (kinds.RECV, kinds.TRANSFER):
            readers.setdefault((record.rank, record.ubatch), []).append(record)
    for records in readers.values():
        records.sort(key=lambda r: r.id)
    for hook in hooks:
        found.checked += 1
        early = _early_reader(hook, readers.get((hook.registered.rank, hook.owner), []))
        if early is not None:
            found.violate(
                f"{early.name} (#{early.id}) of ubatch {hook.owner} (rank {early.rank}, layer {early.layer}) reads "
                f"what hook {hook.number} completes, and was launched before that hook ran (#{hook.runs[0].id})",
                early,
                hook.runs[0].id,
                hook.receives[0].id,
            )
    return found


def _early_reader(hook: HookHistory, readers: list[Record]) -> Record | None:
    receive = hook.receives[0]
    if not receive.writes:
        raise UsageError.of(
            "a recv record names the bytes that it completes", fix="record its writes", record=receive.id
        )
    for record in readers[bisect_right(readers, hook.registered.id, key=lambda r: r.id) :]:
        if record.id > receive.id:
            return None
        if any_overlap(record.reads, receive.writes):
            return record
    return None
