"""The normal mode of DeepEP V1's `Buffer` on one node of the simulated machine: the methods that the adapter calls.

A dispatch is two collectives on the library's comm stream: `notify_dispatch` exchanges counts, `dispatch` moves rows. In
between the host allocates exactly as many rows as will come, so it spins until the first one has ended, holding the GIL;
with `num_worst_tokens` it does not. A combine is one collective. Kernels take `num_sms` SMs, and their rate follows.

On devices the payload is bf16. Here it keeps the model's dtype, so that fp32 logits can be compared tightly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dbo.errors import ConfigError, NotAvailable
from dbo.trace import kinds
from sim.alltoall.deepep_call import EventHandle, EventOverlap, LibraryCall, remote_bytes, spin_for_counts, swap_blocks
from sim.collectives import SimGroup
from sim.engine import SMS_PER_DEVICE
from sim.work import Work

if TYPE_CHECKING:
    from sim.streams import SimStream
    from sim.world import SimWorld

DEFAULT_SMS = 20


@dataclass(frozen=True, kw_only=True)
class DispatchHandle:
    """What combine needs to send rows back.

    Attributes:
        tokens: T of the dispatch. topk: K.
        source, token: of each received row, `[N]` int32: its rank and its index there.
        in_rank: `[T, R]` bool.
    """

    tokens: int
    topk: int
    source: Any
    token: Any
    in_rank: Any


class HighThroughputBuffer:
    """One rank's end. `payload` does the arithmetic (numeric mode) or nothing (ordering mode)."""

    def __init__(self, world: SimWorld, payload: Any) -> None:
        self.world = world
        self.payload = payload
        self.group = SimGroup(world, "deepep")
        self.num_sms = DEFAULT_SMS

    def restart(self) -> None:
        """A new epoch: counting begins again."""
        self.group.restart()

    def get_comm_stream(self) -> SimStream:
        """The library's stream."""
        return self.world.comm

    def set_num_sms(self, new_num_sms: int) -> None:
        """SMs of later calls. A channel takes two.

        Raises:
            ConfigError: an odd count, none at all, or more than a device has.
        """
        if new_num_sms % 2 or not 0 < new_num_sms <= SMS_PER_DEVICE:
            rule = f"the SM count is even and at most {SMS_PER_DEVICE}"
            raise ConfigError.of(rule, fix="use such a count", num_sms=new_num_sms)
        self.num_sms = new_num_sms

    def capture(self) -> EventOverlap:
        """An event on the stream that is current now."""
        return EventOverlap(EventHandle(self.world))

    def get_dispatch_layout(
        self,
        topk_idx: Any,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Any, None, Any, Any, EventOverlap]:
        """Counts of ids `[T, K]`: (tokens per rank `[R]`, None, per expert `[E]`, in_rank `[T, R]` bool, event)."""
        world, payload, access = self.world, self.payload, self.world.tensors.access
        call = self._open(previous_event, async_finish, allocate_on_comm_stream)
        with call.allocating():
            per_rank = payload.empty((world.size,), "int32", "num_tokens_per_rank")
            per_expert = payload.empty((num_experts,), "int32", "num_tokens_per_expert")
            in_rank = payload.empty((topk_idx.shape[0], world.size), "bool", "is_token_in_rank")
        made = (per_rank, per_expert, in_rank)
        world.comm.launch(
            Work(
                kind=kinds.OP,
                name="dispatch_layout",
                duration_us=world.cost.kernel_us,
                reads=(access(topk_idx),),
                writes=tuple(map(access, made)),
                run=payload.layout(topk_idx, *made),
                src=world.source(),
            )
        )
        return per_rank, None, per_expert, in_rank, call.close((topk_idx, *made))

    def dispatch(
        self,
        x: Any,
        handle: Any = None,
        num_tokens_per_rank: Any = None,
        num_tokens_per_rdma_rank: Any = None,
        is_token_in_rank: Any = None,
        num_tokens_per_expert: Any = None,
        topk_idx: Any = None,
        topk_weights: Any = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Any = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Any, Any, Any, list[int], DispatchHandle, EventOverlap]:
        """Rows of `x` `[T, H]` to the ranks of their experts.

        Returns:
            (x `[N, H]`, local ids `[N, K]` or -1, weights `[N, K]`, rows per local expert (empty with
            `num_worst_tokens`), handle, event). Rows come by (source rank, token).
        """
        if isinstance(x, tuple) or handle is not None or config is not None:
            rule = "the simulated dispatch carries one tensor, with a layout and the default tuning"
            raise NotAvailable.of(rule, fix="pass x as a tensor, no handle, no config", handle=handle, config=config)
        world, payload = self.world, self.payload
        call = self._open(previous_event, async_finish, allocate_on_comm_stream)
        counts: list[int] = []
        per_expert: list[list[int]] = []
        member = payload.counts(topk_idx, num_tokens_per_rank, num_tokens_per_expert)
        with call.on_comm():
            self._exchange(
                "notify_dispatch",
                ([num_tokens_per_expert.shape[0]], "int32"),
                member,
                (num_tokens_per_rank, num_tokens_per_expert, is_token_in_rank),
                (),
                world.cost.high_throughput_notify_us,
                _read_counts(counts, per_expert),
            )
            if not num_worst_tokens:
                spin_for_counts(world, "receive counts of dispatch")
        rows, topk = num_worst_tokens or sum(counts), topk_idx.shape[1]
        with call.allocating():
            out = payload.empty((rows, x.shape[1]), payload.dtype_of(x), "recv_x")
            ids = payload.empty((rows, topk), "int64", "recv_topk_idx")
            weights = payload.empty((rows, topk), "float32", "recv_topk_weights")
            source = payload.empty((rows,), "int32", "recv_src_rank")
            token = payload.empty((rows,), "int32", "recv_src_idx")
        made, read = (out, ids, weights, source, token), (x, topk_idx, topk_weights, is_token_in_rank)
        local = num_tokens_per_expert.shape[0] // world.size
        with call.on_comm():
            self._exchange(
                "dispatch",
                ([x.shape[1]], payload.dtype_of(x)),
                payload.rows(x, topk_idx, topk_weights, is_token_in_rank, local),
                read,
                made,
                world.cost.high_throughput("dispatch", self._bytes(x, x.shape[0], topk), self.num_sms),
                swap_blocks(payload.receive(*made, clean=True)),
            )
        aligned = [_aligned(sum(of_expert), expert_alignment) for of_expert in zip(*per_expert, strict=True)]
        back = DispatchHandle(tokens=x.shape[0], topk=topk, source=source, token=token, in_rank=is_token_in_rank)
        touched = (*read, *made, num_tokens_per_rank, num_tokens_per_expert)
        return out, ids, weights, [] if num_worst_tokens else aligned, back, call.close(touched)

    def combine(
        self,
        x: Any,
        handle: DispatchHandle,
        topk_weights: Any = None,
        bias: Any = None,
        config: Any = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Any, None, EventOverlap]:
        """Results `[N, H]` back to their ranks, added up without weights: (`[T, H]`, None, event)."""
        if topk_weights is not None or bias is not None or config is not None:
            rule = "the simulated combine adds rows up, no more"
            raise NotAvailable.of(rule, fix="drop topk_weights, bias and config", bias=bias, config=config)
        payload = self.payload
        call = self._open(previous_event, async_finish, allocate_on_comm_stream)
        with call.allocating():
            combined = payload.empty((handle.tokens, x.shape[1]), payload.dtype_of(x), "combined")
        read = (x, handle.source, handle.token, handle.in_rank)
        with call.on_comm():
            self._exchange(
                "combine",
                ([x.shape[1]], payload.dtype_of(x)),
                payload.results(x, handle.source, handle.token),
                read,
                (combined,),
                self.world.cost.high_throughput("combine", self._bytes(x, handle.tokens, handle.topk), self.num_sms),
                swap_blocks(payload.reduce(combined)),
            )
        return combined, None, call.close((*read, combined))

    def _open(self, previous_event: Any, asynchronous: bool, allocate_on_comm_stream: bool) -> LibraryCall:
        if allocate_on_comm_stream and (previous_event is None or not asynchronous):
            raise ConfigError.of(
                "allocate_on_comm_stream needs previous_event and async_finish",
                fix="pass both or neither",
                previous_event=previous_event,
                async_finish=asynchronous,
            )
        return LibraryCall(
            self.world,
            previous_event=previous_event,
            asynchronous=asynchronous,
            allocate_on_comm_stream=allocate_on_comm_stream,
        )

    def _exchange(
        self,
        op: str,
        signature: tuple[list[int], str],
        member: Any,
        reads: tuple[Any, ...],
        writes: tuple[Any, ...],
        duration_us: float,
        connect: Callable[..., Any],
    ) -> None:
        access = self.world.tensors.access
        self.group.exchange(
            Work(
                kind=kinds.EXCHANGE,
                name=op,
                reads=tuple(map(access, reads)),
                writes=tuple(map(access, writes)),
                duration_us=duration_us,
                takes_sms=self.num_sms,
            ),
            signature=signature,
            value=member,
            connect=connect,
        )

    def _bytes(self, x: Any, tokens: int, topk: int) -> int:
        return remote_bytes((tokens, x.shape[1]), topk, self.world.size, self.world.tensors.itemsize(x))


def _read_counts(counts: list[int], per_expert: list[list[int]]) -> Callable[..., Any]:
    """For `SimGroup.exchange`: how many rows come from each rank, and how many for each local expert."""

    def connect(members: dict[int, Any], rank: int) -> tuple[Callable[[], None], Callable[[], None]]:
        def begin() -> None:
            counts[:] = [members[peer].block(rank) for peer in sorted(members)]
            per_expert[:] = [members[peer].experts(rank) for peer in sorted(members)]

        return begin, lambda: None

    return connect


def _aligned(rows: int, alignment: int) -> int:
    return -(-rows // alignment) * alignment
