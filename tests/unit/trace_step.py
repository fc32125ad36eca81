"""A whole good run by hand: the overlap schedule of low latency mode, without any of the code that plays it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dbo.trace import Access, Trace
from tests.unit.trace_builder import TraceBuilder

DURATIONS_US = {"A0": 5.0, "A1": 5.0, "MLP": 10.0, "S": 4.0}
TRANSFER_US = 8.0
POINTS_US = 1.0
TOKENS = (3, 2)
"""Real tokens of the two ubatches; the second one has a padding row besides."""

_Action = tuple[int, str, int]


def low_latency_run(*, ranks: int = 2, layers: int = 3, steps: int = 1) -> Trace:
    """Ranks that run the same split steps in lockstep; ubatch 0 leads."""
    run = _Run(ranks, layers)
    for step in range(steps):
        run.step(step)
    return run.b.trace


def plan(
    requests: list[tuple[int, int]], rows: int, *, request_offset: int = 0, slots: list[int] | None = None
) -> dict:
    """A batch plan of (query length, computed tokens) requests, `rows` token rows, block size 4."""
    loc = [0]
    for query, _ in requests:
        loc.append(loc[-1] + query)
    positions = [computed + k for query, computed in requests for k in range(query)]
    table = [[4 * (request_offset + i) + 1 + k for k in range(4)] for i in range(len(requests))]
    row_of = [i for i, (query, _) in enumerate(requests) for _ in range(query)]
    real = [table[i][p // 4] * 4 + p % 4 for i, p in zip(row_of, positions, strict=True)]
    pad = [0] * (rows - loc[-1])
    return {
        "query_start_loc": loc,
        "seq_lens": [q + c for q, c in requests],
        "num_computed_tokens": [c for _, c in requests],
        "num_reqs": len(requests),
        "num_actual_tokens": loc[-1],
        "num_tokens_padded": rows,
        "max_query_len": max(q for q, _ in requests),
        "max_seq_len": max(q + c for q, c in requests),
        "block_table": table,
        "slot_mapping": (slots or real) + pad,
        "positions": positions + pad,
        "causal": True,
        "is_prefilling": [True] * len(requests),
        "dcp_local_seq_lens": None,
        "dcp_layout": None,
    }


def split_slices() -> dict[str, Any]:
    """Requests of 2 and 3 new tokens, padded to 6 rows, cut after token 3: the second request is in both ubatches."""
    parent = plan([(2, 4), (3, 1)], 6)
    first = plan([(2, 4), (1, 1)], 3)
    second = plan([(2, 2)], 3, request_offset=1)
    return {"parent": parent, "ubatches": [first, second], "block_size": 4}


def decision(ranks: int) -> dict[str, Any]:
    return {
        "split": True,
        "num_tokens_padded": [6] * ranks,
        "cudagraph_mode": "NONE",
        "split_points": [3],
        "num_ubatches": 2,
        "all_idle": False,
        "uniform_query_len": 0,
        "reason": "",
    }


def _ring(layers: int) -> Iterator[_Action]:
    """What the two ubatches do, in the order in which the baton goes round."""

    def program(u: int) -> Iterator[_Action]:
        for layer in range(layers):
            yield from (
                (u, a, layer) for a in ("A0", "A1", "hook", "D.send", "yield", "MLP", "hook", "C.send", "S", "yield")
            )
        yield u, "exit", layers

    programs, current, left = [program(0), program(1)], 0, {0, 1}
    entered: set[int] = set()
    while left:
        if current not in entered:
            entered.add(current)
            yield current, "enter", 0
        for action in programs[current]:
            yield action
            if action[1] in ("yield", "exit"):
                break
        if action[1] == "exit":
            left.discard(current)
        if 1 - current in left:
            current = 1 - current
            if current in entered:
                yield current, "resume", 0


class _Run:
    def __init__(self, ranks: int, layers: int) -> None:
        self.b = TraceBuilder(ranks=ranks, ubatches=2, config={"block_size": 4})
        self.ranks, self.layers = ranks, layers
        self.collectives = self.call = 0
        names = ("h", "q", "x", "xin", "y", "out", "s")
        self.buf = {
            (r, u, n): self.b.buffer(f"{n}.u{u}", rank=r) for r in range(ranks) for u in range(2) for n in names
        }
        self.landing = {(r, k): self.b.buffer(f"recv{k}", 64 * ranks, rank=r) for r in range(ranks) for k in range(2)}
        self.host: dict[tuple[int, str], int] = {}
        for r in range(ranks):
            self._host(r, "main", "config", config={"enable_dbo": True, "ubatch_size": 2})
            self._host(r, "main", "reserve", what="staging", slot="u0", size=64, generation=1)
            self._host(r, "main", "lock", what="staging")
            self._host(r, "main", "capture.begin", name="g", graph="g")
            self._host(r, "main", "capture.end", name="g", graph="g", calls=1)
            self._host(r, "main", "bake", graph="g", slot="u0", generation=1)
            self._host(r, "main", "graph.put", key={"rows": [6]}, program={"rows": [6]})

    def _host(self, rank: int, line: str, kind: str, after: list[int] | None = None, **rest: Any) -> int:
        id = self.b.add(kind, line, rank=rank, after=after or [], **rest)
        self.host[rank, line] = id
        return id

    def step(self, step: int) -> None:
        b = self.b.at(step=step, layer=-1, ubatch=-1)
        arrivals = []
        for r in range(self.ranks):
            self._host(r, "main", "step.begin", tokens=5, requests=2)
            attrs = {"group": "control", "index": self.collectives, "op": "all_reduce", "shape": [7, self.ranks]}
            arrivals.append(self._host(r, "main", "collective", dtype="int32", tag=step, ranks=self.ranks, **attrs))
        meet = b.add("meet", "control", rank=-1, after=arrivals, step=-1)
        self.collectives += 1
        for r in range(self.ranks):
            table = [[n] * self.ranks for n in (step, 5, 6, 1, 0, 0, 0)]
            self._host(r, "main", "decide", [meet], column={}, table=table, decision=decision(self.ranks))
            self._host(r, "main", "slices", **split_slices())
            self._host(r, "main", "use", what="staging", slot="u0", size=[32, 32])
            self._host(r, "main", "graph.get", key={"rows": [6]}, program={"rows": [6]})
            self._host(r, "main", "replay", graph="g", calls=1, baked={"buffer": 0}, live={"buffer": 0})
            self._host(r, "main", "numeric", name="logits", error=1e-6, limit=1e-4, reference="one rank")
        self.baton = {r: self.host[r, "main"] for r in range(self.ranks)}
        self.hooks: dict[int, tuple[int, int, str, int, int]] = {}
        self.counts = [0, 0]
        self.number = 0
        for ubatch, action, layer in _ring(self.layers):
            self._act(ubatch, action, layer)
        for r in range(self.ranks):
            b.at(ubatch=-1, layer=-1)
            self._host(
                r, "main", "step.end", [self.baton[r]], status="ok", error=None, rows=5, expected_rows=5, live_threads=0
            )

    def _act(self, u: int, action: str, layer: int) -> None:
        self.b.at(ubatch=u, layer=layer)
        line = f"u{u}"
        each = range(self.ranks)
        if action in ("enter", "resume"):
            for r in each:
                kind = "ubatch.enter" if action == "enter" else "resume"
                self._host(r, line, kind, [self.baton[r]], index=self.counts[u])
        elif action == "yield":
            for r in each:
                self.baton[r] = self._host(r, line, "yield", to=1 - u, index=self.counts[u])
            self.counts[u] += 1
        elif action == "hook":
            self._hook(u)
        elif action == "exit":
            self._hook(u)
            self.b.at(ubatch=u, layer=-1)
            for r in each:
                self.baton[r] = self._host(
                    r,
                    line,
                    "ubatch.exit",
                    yields=self.counts[u],
                    declared_yields=2 * self.layers,
                    error="",
                    hook_pending=False,
                )
        elif action.endswith(".send"):
            self._send(u, action, layer)
        else:
            for r in each:
                self._compute(r, u, action)

    def _compute(self, r: int, u: int, point: str) -> None:
        read, write = {"A0": ("out", "q"), "A1": ("q", "x"), "MLP": ("xin", "y"), "S": ("x", "s")}[point]
        host = self._host(r, f"u{u}", "point", point=point)
        self.b.op(
            point,
            rank=r,
            point=point,
            dur=DURATIONS_US[point],
            after=[host],
            src=f"layer.py:{len(point)}",
            reads=[self.buf[r, u, read]],
            writes=[self.buf[r, u, write]],
        )

    def _send(self, u: int, point: str, layer: int) -> None:
        op, source = ("dispatch", "x") if point == "D.send" else ("combine", "y")
        call, self.call = self.call, self.call + 1
        arrived = []
        for r in range(self.ranks):
            host = self._host(r, f"u{u}", "point", point=point)
            sent = self.b.add(
                "send",
                "compute",
                f"{op}.send",
                rank=r,
                point=point,
                dur=POINTS_US,
                after=[host],
                call=call,
                buffer=call % 2,
                op=op,
                rows=TOKENS[u],
                real=TOKENS[u],
                sms=20,
                reads=[self.buf[r, u, source]],
            )
            regions = [Access.interval(self.landing[p, call % 2], 64 * r, 64 * r + 64) for p in range(self.ranks)]
            arrived.append(
                self.b.add(
                    "transfer",
                    "net",
                    f"{op}.transfer",
                    rank=r,
                    point=point,
                    dur=TRANSFER_US,
                    after=[sent],
                    writes=regions,
                    call=call,
                    op=op,
                    dst="all",
                )
            )
        meet = self.b.add("meet", f"low_latency.{call}", rank=-1, ubatch=-1, step=-1, after=arrived)
        for r in range(self.ranks):
            self._host(r, f"u{u}", "hook.register", hook=self.number, owner=u, holder=1 - u)
        self.hooks[1 - u] = (self.number, u, point.replace("send", "recv"), meet, call)
        self.number += 1

    def _hook(self, u: int) -> None:
        entry = self.hooks.pop(u, None)
        if entry is None:
            return
        number, owner, point, meet, call = entry
        op, target = ("dispatch", "xin") if point == "D.recv" else ("combine", "out")
        for r in range(self.ranks):
            host = self._host(r, f"u{u}", "hook.run", hook=number, owner=owner, runner=u)
            self.b.add(
                "recv",
                "compute",
                f"{op}.recv",
                rank=r,
                point=point,
                ubatch=owner,
                dur=POINTS_US,
                after=[meet, host],
                reads=[self.landing[r, call % 2]],
                writes=[self.buf[r, owner, target]],
                call=call,
                buffer=call % 2,
                op=op,
            )
