"""The low-latency all-to-all of the simulated machine, with the two methods of DeepEP's `Buffer` that the adapter calls.

Calls are numbered over dispatch and combine; call k uses receive buffer k mod 2, and its send clears
the flags of the other one. A call has two halves: the send kernel on the current stream, then a transfer that runs beside
the streams, then the receive kernel, which the hook launches on the stream that was current at the send.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dbo.errors import NotAvailable
from dbo.trace import Access, kinds
from sim.engine import Node
from sim.work import Work

if TYPE_CHECKING:
    from sim.world import Cluster, SimWorld

# A rank's receive buffer has one region a peer. Only the region matters for ordering, not its size.
REGION_BYTES = 1024


class SymmetricWindow:
    """One of the two receive buffers, of all ranks: rank r's lies at r times its size, region p in it is peer p's.

    One storage for all, so that what a rank writes into every peer's buffer is one strided access.
    """

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.ranks = cluster.size
        self.buffer = cluster.engine.new_buffer(-1, name, REGION_BYTES * self.ranks**2)

    def of_rank(self, rank: int) -> Access:
        """All regions of one rank."""
        own_bytes = REGION_BYTES * self.ranks
        return Access.interval(self.buffer, rank * own_bytes, (rank + 1) * own_bytes)

    def sent_by(self, rank: int) -> Access:
        """One region in every rank's buffer."""
        return Access(self.buffer, rank * REGION_BYTES, (self.ranks, REGION_BYTES), (self.ranks * REGION_BYTES, 1))


class Exchange:
    """One call over all ranks: the meet that ends when all transfers have arrived, and what each rank sent."""

    def __init__(self, meet: Node) -> None:
        self.meet = meet
        self.sent: dict[int, Any] = {}
        self.ops: dict[int, str] = {}


class LowLatencyBuffer:
    """One rank's end. `payload` does the arithmetic (numeric mode) or nothing (ordering mode)."""

    def __init__(self, world: SimWorld, payload: Any) -> None:
        self.world = world
        self.payload = payload
        self.calls = 0

    def restart(self) -> None:
        """A new epoch starts at buffer 0."""
        self.calls = 0

    def buffer_of(self, call: int) -> int:
        """The receive buffer of a call."""
        return call % 2

    def low_latency_dispatch(
        self,
        x: Any,
        topk_idx: Any,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        *,
        use_fp8: bool = True,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> tuple[Any, Any, Any, None, Callable[[], None]]:
        """Start a dispatch of `x` `[T, H]`; returns (recv_x `[L, R * M, H]`, counts `[L]`, handle, None, hook)."""
        self._refuse(use_fp8, async_finish, return_recv_hook)
        plan = self.payload.dispatch(x, topk_idx, num_max_dispatch_tokens_per_rank, num_experts)
        hook = self._call("dispatch", plan)
        return plan.result, plan.counts, plan.handle, None, hook

    def low_latency_combine(
        self,
        x: Any,
        topk_idx: Any,
        topk_weights: Any,
        handle: Any,
        *,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> tuple[Any, None, Callable[[], None]]:
        """Start a combine of `x` `[L, R * M, H]`; returns (combined `[T, H]`, None, hook)."""
        self._refuse(False, async_finish, return_recv_hook)
        plan = self.payload.combine(x, topk_idx, topk_weights, handle)
        hook = self._call("combine", plan)
        return plan.result, None, hook

    def _refuse(self, use_fp8: bool, async_finish: bool, return_recv_hook: bool) -> None:
        if use_fp8 or async_finish or not return_recv_hook:
            raise NotAvailable.of(
                "the simulated low-latency exchange carries the model's dtype and returns a hook",
                fix="call it with use_fp8=False, async_finish=False, return_recv_hook=True",
                use_fp8=use_fp8,
                async_finish=async_finish,
                return_recv_hook=return_recv_hook,
            )

    def _call(self, op: str, plan: Any) -> Callable[[], None]:
        """Start a call; returns the hook that completes it. A captured call keeps the buffer that it was captured with."""
        world = self.world
        stream, src = world.current_stream(), world.source()
        under_way: list[tuple[int, int, Exchange]] = []
        capture = world.capture
        if capture is None:
            under_way.append(self._send(op, plan, self.buffer_of(self.calls), src))
        else:
            buffer = self.buffer_of(capture.low_latency_calls)
            capture.low_latency_calls += 1
            capture.note((*plan.reads, *plan.writes))

            def send_again() -> None:
                under_way[:] = [self._send(op, plan, buffer, src)]

            capture.add(stream, send_again)

        def hook() -> None:
            if world.capture is not None:
                world.capture.add(stream, hook)
            else:
                call, buffer, exchange = under_way[0]
                self._receive(op, plan, call, buffer, exchange, stream, src)

        return hook

    def _send(self, op: str, plan: Any, buffer: int, src: str) -> tuple[int, int, Exchange]:
        world, cluster = self.world, self.world.cluster
        cluster.check_peers(world.rank)
        call, self.calls = self.calls, self.calls + 1
        tags = world.task().tags
        exchange = cluster.low_latency_exchange(call)
        exchange.ops[world.rank] = op
        real = world.real_tokens()
        attrs: dict[str, Any] = {"call": call, "buffer": buffer, "op": op, "real": real}

        def send() -> None:
            exchange.sent[world.rank] = plan.send()
            attrs["rows"] = plan.rows(real)

        sent = world.current_stream().launch(
            Work(
                kind=kinds.SEND,
                name=f"{op}.send",
                duration_us=world.cost.low_latency_send_us,
                reads=plan.reads,
                run=send,
                src=src,
                attrs=attrs,
            )
        )
        arrived = self._transfer(op, call, buffer, plan.nbytes, sent, tags)
        cluster.join_meet(exchange.meet, arrived, world.rank)
        if len(exchange.ops) == world.size and len(set(exchange.ops.values())) == 1:
            world.engine.release_hold(exchange.meet)
        return call, buffer, exchange

    def _receive(self, op: str, plan: Any, call: int, buffer: int, exchange: Exchange, stream: Any, src: str) -> None:
        world = self.world
        world.cluster.check_peers(world.rank)
        window = world.cluster.low_latency_windows[buffer]
        stream.launch(
            Work(
                kind=kinds.RECV,
                name=f"{op}.recv",
                duration_us=world.cost.low_latency_recv_us,
                reads=(window.of_rank(world.rank),),
                writes=plan.writes,
                run=lambda: plan.receive([exchange.sent[r] for r in range(world.size)], world.rank),
                after=(exchange.meet,),
                src=src,
                attrs={"call": call, "buffer": buffer, "op": op},
            )
        )

    def _transfer(
        self, op: str, call: int, buffer: int, nbytes: int, sent: Node, tags: tuple[int, int, int, str]
    ) -> Node:
        """The bytes on their way, written into this rank's region of every peer's receive buffer."""
        world = self.world
        regions = (world.cluster.low_latency_windows[buffer].sent_by(world.rank),)
        node = world.engine.node(
            Work(
                kind=kinds.TRANSFER,
                name=f"{op}.transfer",
                after=(sent,),
                duration_us=world.cost.transfer(nbytes),
                writes=regions,
                finish=lambda: None,
                attrs={"call": call, "op": op, "dst": "all"},
            ),
            rank=world.rank,
            line="net",
            tags=tags,
            stream_tail=world.net_tail,
        )
        world.net_tail = node
        return node


class SymbolPlan:
    """One call's data in ordering mode: which bytes, no values."""

    def __init__(self, world: SimWorld, inputs: list[Any], shape: tuple[int, ...], nbytes: int, rows: Any, handle: Any):
        from sim.symbols import Symbol

        self.result = Symbol(world, shape, name="received")
        self.counts = Symbol(world, (shape[0],), name="counts")
        self.handle = handle
        self.nbytes = nbytes
        self.reads = tuple(i.access() for i in inputs)
        self.writes = (self.result.access(), self.counts.access())
        self._rows = rows

    def send(self) -> None:
        return None

    def rows(self, real: int) -> int:
        """Rows with an expert; in a graph they follow the replay's `real` tokens."""
        return real if self._rows is None else self._rows

    def receive(self, sent: list[Any], rank: int) -> None:
        return None


class SymbolPayload:
    """Plans without values."""

    def __init__(self, world: SimWorld) -> None:
        self.world = world

    def dispatch(self, x: Any, topk_idx: Any, max_tokens: int, num_experts: int) -> SymbolPlan:
        world = self.world
        tokens, hidden = x.shape
        shape = (num_experts // world.size, world.size * max_tokens, hidden)
        rows = topk_idx.notes.get("rows", tokens)
        nbytes = tokens * topk_idx.shape[1] * hidden * x.itemsize * (world.size - 1) // world.size
        return SymbolPlan(world, [x, topk_idx], shape, nbytes, rows, (tokens, hidden))

    def combine(self, x: Any, topk_idx: Any, topk_weights: Any, handle: Any) -> SymbolPlan:
        tokens, hidden = handle
        rows = topk_idx.notes.get("rows", tokens)
        nbytes = tokens * topk_idx.shape[1] * hidden * x.itemsize * (self.world.size - 1) // self.world.size
        return SymbolPlan(self.world, [x, topk_weights], (tokens, hidden), nbytes, rows, None)
