"""DeepEP V2's `ElasticBuffer` on one node of the simulated machine: the methods that the adapter calls.

A dispatch is one collective on the process's one comm stream. Its kernel tells the counts first and then fills the
process's receive buffer; an epilogue on the same stream copies the rows out. A combine fills the same buffer and an epilogue
reduces it. There is no second buffer: only the order of that one stream keeps calls apart, so every filling is tagged with
its owner and every epilogue expects its own tag.

On devices the payload is bf16; here it keeps the model's dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dbo.errors import ConfigError, NotAvailable
from dbo.trace import Access, kinds
from sim.alltoall.deepep_call import EventHandle, EventOverlap, LibraryCall, remote_bytes, spin_for_counts
from sim.collectives import SimGroup
from sim.work import Work

if TYPE_CHECKING:
    from sim.streams import SimStream
    from sim.world import SimWorld

AUTOMATIC_SMS = 16
# Only that it is one buffer matters for ordering, not its size.
BUFFER_BYTES = 1024


@dataclass(frozen=True, kw_only=True)
class EPHandle:
    """What a dispatch leaves for its combine.

    Attributes:
        tokens: T of the dispatch. topk: K. num_sms: of the dispatch.
        num_recv_tokens: received rows; without CPU sync the worst case.
        psum_num_recv_tokens_per_scaleup_rank: `[R]` int32, running count of received rows.
        num_recv_tokens_per_expert_list: rows per local expert; empty without CPU sync.
        source, token: of each received row, `[N]` int32: its rank and its index there.
    """

    tokens: int
    topk: int
    num_sms: int
    num_recv_tokens: int
    psum_num_recv_tokens_per_scaleup_rank: Any
    num_recv_tokens_per_expert_list: list[int]
    source: Any
    token: Any


class ElasticBuffer:
    """One rank's end. `payload` does the arithmetic (numeric mode) or nothing (ordering mode)."""

    def __init__(self, world: SimWorld, payload: Any) -> None:
        self.world = world
        self.payload = payload
        self.group = SimGroup(world, "deepep_v2")
        self.receive_buffer = world.engine.new_buffer(world.rank, "deepep_v2.recv", BUFFER_BYTES)
        self._held: list[Any] = []

    def restart(self) -> None:
        """A new epoch: counting begins again."""
        self.group.restart()

    def reserve(self, *, tokens: int, hidden: int, num_topk: int) -> None:
        """The buffer of the simulated machine has no size."""

    def get_comm_stream(self) -> SimStream:
        """The process's one comm stream."""
        return self.world.comm

    def capture(self) -> EventHandle:
        """An event on the stream that is current now."""
        return EventHandle(self.world)

    def dispatch(
        self,
        x: Any,
        topk_idx: Any = None,
        topk_weights: Any = None,
        *,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        num_sms: int = 0,
        previous_event: EventHandle | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
    ) -> tuple[Any, Any, Any, EPHandle, EventOverlap]:
        """Rows of `x` `[T, H]` to the ranks of their experts: (x `[N, H]`, local ids `[N, K]`, weights, handle, event).

        With CPU sync (the default) N is what comes. Without, N = R * `num_max_tokens_per_rank`, and rows past the running
        count's end are left as they are, ids included.
        """
        if isinstance(x, tuple) or do_expand or num_experts is None or num_max_tokens_per_rank is None:
            rule = "the simulated dispatch carries one tensor in rows, with num_experts and num_max_tokens_per_rank"
            raise NotAvailable.of(rule, fix="pass these, and do_expand=False", do_expand=do_expand)
        if x.shape[0] > num_max_tokens_per_rank:
            rule = "a rank dispatches at most num_max_tokens_per_rank tokens"
            raise ConfigError.of(
                rule, fix="raise it on all ranks", tokens=x.shape[0], num_max_tokens_per_rank=num_max_tokens_per_rank
            )
        world, payload = self.world, self.payload
        sync, sms, topk = do_cpu_sync is not False, num_sms or AUTOMATIC_SMS, topk_idx.shape[1]
        call = self._open(previous_event, async_with_compute_stream, allocate_on_comm_stream)
        with call.allocating():
            ends = payload.empty((world.size,), "int32", "psum_num_recv_tokens")
        arrived, read = _Arrivals(), (x, topk_idx, topk_weights)
        member = _Member(payload.counts_of(topk_idx, num_experts), payload.rows(*read, None, num_experts // world.size))
        with call.on_comm():
            told, agreed = arrived.connect(payload.write_ends(ends)), (num_max_tokens_per_rank,)
            self._collective("dispatch", x, member, (topk_idx,), (ends,), sms, told, agreed)
            if sync:
                spin_for_counts(world, "receive counts of dispatch")
            self._fill("dispatch", read, sms, self._bytes(x, x.shape[0], topk), arrived)
        rows = sum(arrived.counts) if sync else world.size * num_max_tokens_per_rank
        with call.allocating():
            out = payload.empty((rows, x.shape[1]), payload.dtype_of(x), "recv_x")
            ids = payload.empty((rows, topk), "int64", "recv_topk_idx")
            weights = payload.empty((rows, topk), "float32", "recv_topk_weights")
            source = payload.empty((rows,), "int32", "recv_src_rank")
            token = payload.empty((rows,), "int32", "recv_src_idx")
        made = (out, ids, weights, source, token)
        self._epilogue("dispatch", (ends,), made, payload.receive(*made, clean=False))
        aligned = [_aligned(sum(n), expert_alignment or 1) for n in zip(*arrived.per_expert, strict=True)]
        handle = EPHandle(
            tokens=x.shape[0],
            topk=topk,
            num_sms=sms,
            num_recv_tokens=rows,
            source=source,
            token=token,
            psum_num_recv_tokens_per_scaleup_rank=ends,
            num_recv_tokens_per_expert_list=aligned if sync else [],
        )
        return out, ids, weights, handle, call.close((*read, *made, ends))

    def combine(
        self,
        x: Any,
        handle: EPHandle,
        topk_weights: Any = None,
        bias: Any = None,
        *,
        num_sms: int = 0,
        previous_event: EventHandle | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Any, None, EventOverlap]:
        """Results `[N, H]` back to their ranks, added up without weights: (`[T, H]`, None, event)."""
        if topk_weights is not None or bias is not None:
            rule = "the simulated combine adds rows up, no more"
            raise NotAvailable.of(rule, fix="drop topk_weights and bias", bias=bias)
        payload, sms = self.payload, num_sms or handle.num_sms
        call = self._open(previous_event, async_with_compute_stream, allocate_on_comm_stream)
        with call.allocating():
            combined = payload.empty((handle.tokens, x.shape[1]), payload.dtype_of(x), "combined")
        arrived, read = _Arrivals(), (x, handle.source, handle.token)
        with call.on_comm():
            self._collective("combine", x, _Member(None, payload.results(*read)), (), (), sms, arrived.connect(None))
            self._fill("combine", read, sms, self._bytes(x, handle.tokens, handle.topk), arrived)
        self._epilogue("combine", (), (combined,), payload.reduce(combined))
        return combined, None, call.close((*read, combined))

    # -- the parts of a call ----------------------------------------------------------------------------------------

    def _open(self, previous_event: Any, asynchronous: bool, allocate_on_comm_stream: bool) -> LibraryCall:
        if previous_event is not None and not allocate_on_comm_stream:
            rule = "previous_event means that compute has gone on, so outputs are made on the comm stream"
            raise ConfigError.of(rule, fix="pass allocate_on_comm_stream=True", allocate_on_comm_stream=False)
        return LibraryCall(
            self.world,
            previous_event=previous_event,
            asynchronous=asynchronous,
            allocate_on_comm_stream=allocate_on_comm_stream,
        )

    def _collective(
        self,
        op: str,
        x: Any,
        member: _Member,
        reads: tuple[Any, ...],
        writes: tuple[Any, ...],
        sms: int,
        connect: Callable[..., Any],
        agreed: tuple[int, ...] = (),
    ) -> None:
        """The kernel's first part: all ranks are there, counts are told. `agreed` are numbers that ranks must call with."""
        access = self.world.tensors.access
        self.group.exchange(
            Work(
                kind=kinds.EXCHANGE,
                name=op,
                reads=tuple(map(access, reads)),
                writes=tuple(map(access, writes)),
                duration_us=self.world.cost.elastic_notify_us,
                takes_sms=sms,
            ),
            signature=([x.shape[1], *agreed], self.payload.dtype_of(x)),
            value=member,
            connect=connect,
        )

    def _fill(self, op: str, reads: tuple[Any, ...], sms: int, nbytes: int, arrived: _Arrivals) -> None:
        """The rest of it: rows arrive in the process's receive buffer."""
        world, taken = self.world, list[Any]()

        def begin() -> None:
            taken[:] = [arrived.members[peer].rows.block(world.rank) for peer in sorted(arrived.members)]

        def end() -> None:
            self._held = list(taken)

        world.comm.launch(
            Work(
                kind=kinds.EXCHANGE,
                name=op,
                duration_us=world.cost.elastic(nbytes, sms),
                reads=tuple(map(world.tensors.access, reads)),
                writes=(self._buffer(),),
                run=begin,
                finish=end,
                src=world.source(),
                attrs={"op": op, "sms": sms, "tags": {str(self.receive_buffer): self._tag(op)}},
                takes_sms=sms,
                frees_sms=sms,
            )
        )

    def _epilogue(
        self, op: str, reads: tuple[Any, ...], writes: tuple[Any, ...], deliver: Callable[[list[Any]], None]
    ) -> None:
        """Copy or reduce what lies in the receive buffer into arrays of the call's own."""
        world, access = self.world, self.world.tensors.access
        written = tuple(map(access, writes))
        nbytes = sum(_size(a) for a in written)
        world.comm.launch(
            Work(
                kind=kinds.OP,
                name=f"{op}_epilogue",
                duration_us=world.cost.kernel(2 * nbytes),
                reads=(self._buffer(), *map(access, reads)),
                writes=tuple(a for a in written if _size(a)),
                run=lambda: deliver(self._held),
                src=world.source(),
                attrs={"expects": {str(self.receive_buffer): self._tag(op)}},
            )
        )

    def _buffer(self) -> Access:
        return Access.interval(self.receive_buffer, 0, BUFFER_BYTES)

    def _tag(self, op: str) -> list[Any]:
        """Whose data: the call's own name, the same in its filling and its epilogue."""
        step, layer, ubatch, _ = self.world.tags()
        return [f"u{max(ubatch, 0)}", step, layer, op]

    def _bytes(self, x: Any, tokens: int, topk: int) -> int:
        return remote_bytes((tokens, x.shape[1]), topk, self.world.size, self.world.tensors.itemsize(x))


class _Member:
    """What a rank brings to a call."""

    def __init__(self, counts: Any, rows: Any) -> None:
        self.counts, self.rows = counts, rows


class _Arrivals:
    """What a call has learnt from its peers once its kernel runs."""

    def __init__(self) -> None:
        self.members: dict[int, _Member] = {}
        self.counts: list[int] = []
        self.per_expert: list[list[int]] = []

    def connect(self, write_ends: Callable[[list[int]], None] | None) -> Callable[..., Any]:
        """For `SimGroup.exchange`."""

        def connect(members: dict[int, _Member], rank: int) -> tuple[Callable[[], None], Callable[[], None]]:
            def begin() -> None:
                self.members = members
                if write_ends is not None:
                    self.counts[:] = [members[peer].counts.block(rank) for peer in sorted(members)]
                    self.per_expert[:] = [members[peer].counts.experts(rank) for peer in sorted(members)]

            def end() -> None:
                if write_ends is not None:
                    write_ends(self.counts)

            return begin, end

        return connect


def _size(access: Access) -> int:
    size = 1
    for n in access.sizes:
        size *= n
    return size


def _aligned(rows: int, alignment: int) -> int:
    return -(-rows // alignment) * alignment
