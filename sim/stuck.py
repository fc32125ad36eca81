"""What every blocked line waits for, written into the trace when nothing can move any more.

The detector reads `blocked` records (fields of `dbo.check.waitfor.Waiter`) and finds the minimal stuck set.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dbo.trace import Record, kinds
from sim.engine import Node
from sim.tasks import Task

if TYPE_CHECKING:
    from sim.world import Cluster

Line = tuple[int, str]


def blocked_records(cluster: Cluster, stuck: list[Task]) -> list[Record]:
    """One record for every host task and every stream head that can never go on."""
    heads = _heads(cluster.engine.unfinished())
    records = [_host(cluster, task, stuck, heads) for task in stuck]
    records += [_device(cluster, line, node, heads, stuck) for line, node in sorted(heads.items()) if line[0] >= 0]
    return records


def _heads(nodes: list[Node]) -> dict[Line, Node]:
    """The first unfinished node of every line."""
    heads: dict[Line, Node] = {}
    for node in nodes:
        heads.setdefault((node.record.rank, node.record.line), node)
    return heads


def _host(cluster: Cluster, task: Task, stuck: list[Task], heads: dict[Line, Node]) -> Record:
    waits: tuple[Any, ...] = task.waits or ("nothing",)
    kind = waits[0]
    answer: dict[str, Any] = {"what": f"{kind} {waits[1]}" if len(waits) > 1 else kind, "needs": []}
    if kind == kinds.COLLECTIVE:
        _, group, index, op, missing = waits
        answer |= {"what": f"collective {op}", "group": group, "index": index, "missing": list(missing)}
        answer["needs"] = [[rank, _line_of(rank, stuck)] for rank in missing]
        meeting = cluster.host_meetings.get((cluster.epoch, group, index))
        if meeting is not None and not missing:
            answer["mismatch"] = _mismatch({r: s[0] for r, s in meeting.signatures.items()})
            answer["needs"] = [[r, _line_of(r, stuck)] for r in meeting.signatures if r != task.rank]
    elif kind == "device":
        _, line, record, why = waits
        answer |= {"what": f"{line}: {why}", "needs": [[task.rank, line]]}
    elif kind in ("baton", kinds.BARRIER, kinds.RECOVER):
        answer["needs"] = [[t.rank, t.line] for t in stuck if t.rank == task.rank and t is not task]
        answer["any_of"] = kind == "baton"
    step, layer, ubatch, point = task.tags
    answer |= {"step": step, "layer": layer, "ubatch": ubatch, "point": point}
    return Record(
        cluster.engine.new_id(),
        task.rank,
        task.line,
        kinds.BLOCKED,
        str(answer["what"]),
        t_us=task.now_us,
        step=step,
        layer=layer,
        ubatch=ubatch,
        point=point,
        attrs={"waits_for": answer},
    )


def _device(cluster: Cluster, line: Line, node: Node, heads: dict[Line, Node], stuck: list[Task]) -> Record:
    record = node.record
    answer: dict[str, Any] = {"what": f"{record.kind} {record.name}", "needs": [], "head": record.name}
    meet = _unfinished_meet(cluster, record.after)
    extra: dict[str, Any] = {}
    if any(node is starved for starved in cluster.engine.starved.get(record.rank, ())):
        free = cluster.engine.free_sms[record.rank]
        answer["what"] = f"{node.takes_sms} SMs for {record.name}, {free} are free"
        holders = [n for n in cluster.engine.unfinished() if n.record.rank == record.rank and n.frees_sms]
        answer["needs"] = sorted({(n.record.rank, n.record.line) for n in holders} - {line})
        names = ("sms", "holds_until_peers", "group", "index")
        extra = {"launch": record.id} | {k: record.attrs[k] for k in names if k in record.attrs}
    elif meet is not None:
        members = meet.members or {}
        expected = meet.record.attrs.get("members", range(cluster.size))
        missing = [r for r in expected if r not in members]
        late = [r for r, member in members.items() if not member.done]
        answer |= {"group": meet.record.attrs["group"], "index": meet.record.attrs["index"], "missing": missing}
        answer["needs"] = [[r, _line_of(r, stuck)] for r in missing]
        answer["needs"] += [[r, members[r].record.line] for r in late]
        if not missing and not late:
            answer["mismatch"] = "COLLECTIVE_TYPE_MISMATCH"
            answer["needs"] = [[r, members[r].record.line] for r in members if r != record.rank]
    else:
        blockers = [n.record for n in cluster.engine.unfinished() if n.record.id in record.after]
        answer["needs"] = sorted({(r.rank, r.line) for r in blockers} - {line})
    answer |= {
        "step": record.step,
        "layer": record.layer,
        "ubatch": record.ubatch,
        "point": record.point,
        "src": record.src,
    }
    return Record(
        cluster.engine.new_id(),
        line[0],
        line[1],
        kinds.BLOCKED,
        record.name,
        step=record.step,
        layer=record.layer,
        ubatch=record.ubatch,
        point=record.point,
        src=record.src,
        attrs={"waits_for": answer, **extra},
    )


def _unfinished_meet(cluster: Cluster, after: tuple[int, ...]) -> Node | None:
    for node in cluster.engine.unfinished():
        if node.record.kind == kinds.MEET and node.record.id in after:
            return node
    return None


def _line_of(rank: int, stuck: list[Task]) -> str:
    """The host line of `rank` that ought to come; its main task when none is blocked."""
    lines = [t.line for t in stuck if t.rank == rank]
    ubatches = [line for line in lines if line != "main"]
    return (ubatches or lines or ["main"])[0]


def _mismatch(ops: dict[int, str]) -> str:
    return "COLLECTIVE_TYPE_MISMATCH" if len(set(ops.values())) > 1 else "SIZE_MISMATCH"
