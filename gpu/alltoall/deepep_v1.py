"""DeepEP V1 behind `World.low_latency` and `World.high_throughput` (needs torch and `deep_ep`).

Both wrap one `deep_ep.Buffer` a mode and add what the project needs around each call: the board, the trace, the call's
number. The group is gloo: it is used only to exchange handles when a buffer is made, so two ranks may share one
device.

Facts the code below relies on, with DeepEP 1.2.1:

* low latency asks for as many queue pairs as a rank has experts, and for an even number of calls a step (two buffers);
* its hook launches the receive kernel on the stream that was current at the send;
* normal mode runs on a stream of its own, behind the stream that is current when the call is made; without
  `num_worst_tokens` the host spins for the counts and holds the interpreter's lock all the while.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from dbo.errors import ConfigError, NotAvailable
from dbo.trace import kinds
from gpu.group import Exchanges
from gpu.probe import DEEPEP_V1, deep_ep_version

if TYPE_CHECKING:
    from gpu.device import GpuWorld

LOW_LATENCY = "low_latency"
HIGH_THROUGHPUT = "high_throughput"

LARGEST_HIDDEN_BYTES = 2 * 8192
"""A row of the widest model in bf16: a normal-mode buffer is made before anybody knows the model."""
MOST_COMM_SMS = 48
"""Normal-mode buffers have room for this many SMs, whatever a call then uses."""


def load() -> Any:
    """The library.

    Raises:
        NotAvailable: it is missing, cannot be loaded, or is another version.
    """
    which, why = deep_ep_version()
    if which != "V1":
        rule = "DeepEP V1 is the library behind the deepep_low_latency and deepep_high_throughput backends"
        found = f"DeepEP {which}" if which else why or "nothing"
        raise NotAvailable.of(rule, fix=f"install {DEEPEP_V1} (Python 3.12, CUDA 13)", found=found)
    return importlib.import_module("deep_ep")


LEAST_BYTES = 2**28
"""A low-latency buffer has at least this size, so that a later run of the process finds room in it."""

_KEPT: dict[str, Any] = {}
"""The process's buffers by mode. The libraries under DeepEP are set up once: a second run takes the same ones."""


class DeepEPLowLatency:
    """`deep_ep.Buffer` in low-latency mode, made with the first call, when sizes are known, by all ranks."""

    def __init__(self, world: GpuWorld, process_group: Any) -> None:
        self.world = world
        self.process_group = process_group
        self.library = load()
        self._buffer: Any = None
        self._sizes: tuple[int, int, int] = (0, 0, 0)
        self._results = [world.trace.new_buffer(f"{LOW_LATENCY}.result{i}", 1) for i in range(2)]

    def make_buffer(self, most_tokens: int, hidden: int, num_experts: int) -> Any:
        """The buffer, laid out for these sizes; a collective call whenever they change.

        Raises:
            ConfigError: this process has made a smaller one.
        """
        sizes = (most_tokens, hidden, num_experts)
        if sizes == self._sizes:
            return self._buffer
        buffer_class = self.library.Buffer
        size = buffer_class.get_low_latency_rdma_size_hint(most_tokens, hidden, self.world.size, num_experts)
        if LOW_LATENCY not in _KEPT:
            _KEPT[LOW_LATENCY] = buffer_class(
                self.process_group,
                num_nvl_bytes=0,
                num_rdma_bytes=max(size, LEAST_BYTES),
                low_latency_mode=True,
                num_qps_per_rank=num_experts // self.world.size,
                allow_nvlink_for_low_latency_mode=True,
                explicitly_destroy=True,
            )
        self._buffer = _KEPT[LOW_LATENCY]
        if size > self._buffer.num_rdma_bytes:
            rule = "a process makes one low-latency buffer"
            fix = "start another process for the larger model, or lower --low-latency-max-tokens-per-rank"
            raise ConfigError.of(rule, fix=fix, buffer_bytes=self._buffer.num_rdma_bytes, needed_bytes=size)
        # Flags lie where the sizes put them, and have to be zero there.
        self._buffer.clean_low_latency_buffer(most_tokens, hidden, num_experts)
        self._sizes = sizes
        return self._buffer

    def low_latency_dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        *,
        use_fp8: bool = True,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> tuple[Any, Any, Any, Any, Callable[[], None]]:
        """As the library's; the hook also writes the receive into the trace."""
        buffer = self.make_buffer(num_max_dispatch_tokens_per_rank, x.shape[1], num_experts)
        call = self._sends("dispatch", topk_idx)
        received, counts, handle, event, hook = buffer.low_latency_dispatch(
            x,
            topk_idx,
            num_max_dispatch_tokens_per_rank,
            num_experts,
            use_fp8=use_fp8,
            async_finish=async_finish,
            return_recv_hook=return_recv_hook,
        )
        return received, counts, handle, event, self._receives("dispatch", call, hook)

    def low_latency_combine(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        handle: Any,
        *,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> tuple[torch.Tensor, Any, Callable[[], None]]:
        """As the library's; the hook also writes the receive into the trace."""
        call = self._sends("combine", topk_idx)
        combined, event, hook = self._buffer.low_latency_combine(
            x, topk_idx, topk_weights, handle, async_finish=async_finish, return_recv_hook=return_recv_hook
        )
        return combined, event, self._receives("combine", call, hook)

    def _sends(self, op: str, topk_idx: torch.Tensor) -> int:
        recorder = self.world.trace
        call = self.world.next_index(LOW_LATENCY)
        recorder.came(LOW_LATENCY, call, op)
        attrs = {"call": call, "buffer": call % 2, "op": op, "real": recorder.task.real_tokens}
        record = recorder.timed_device(kinds.SEND, f"{op}.send", attrs=attrs)
        if recorder.keeps:
            recorder.later(record, "rows", (topk_idx >= 0).any(-1).sum())
        return call

    def _receives(self, op: str, call: int, hook: Callable[[], None]) -> Callable[[], None]:
        recorder = self.world.trace

        def receive() -> None:
            recorder.timed_device(
                kinds.RECV,
                f"{op}.recv",
                attrs={"call": call, "buffer": call % 2, "op": op},
                after=(recorder.meet_reference(LOW_LATENCY, call),),
                writes=(recorder.whole(self._results[call % 2]),),
            )
            hook()

        return receive


class DeepEPHighThroughput:
    """`deep_ep.Buffer` in normal mode; every method is the library's."""

    def __init__(self, world: GpuWorld, process_group: Any) -> None:
        self.world = world
        self.library = load()
        self._exchanges = Exchanges(world, HIGH_THROUGHPUT)
        if HIGH_THROUGHPUT not in _KEPT:
            _KEPT[HIGH_THROUGHPUT] = self._make(process_group, world.size)
        self.buffer = _KEPT[HIGH_THROUGHPUT]

    def _make(self, process_group: Any, ranks: int) -> Any:
        buffer_class = self.library.Buffer
        before = buffer_class.num_sms
        buffer_class.set_num_sms(MOST_COMM_SMS)
        try:
            configs = (buffer_class.get_dispatch_config(ranks), buffer_class.get_combine_config(ranks))
        finally:
            buffer_class.set_num_sms(before)
        size = max(config.get_nvl_buffer_size_hint(LARGEST_HIDDEN_BYTES, ranks) for config in configs)
        return buffer_class(process_group, num_nvl_bytes=size, num_rdma_bytes=0, explicitly_destroy=True)

    @property
    def num_sms(self) -> int:
        """SMs of the next call's kernels; a setting of the process."""
        return int(self.library.Buffer.num_sms)

    def set_num_sms(self, new_num_sms: int) -> None:
        """Set them.

        Raises:
            ConfigError: more than the buffer has room for.
        """
        if new_num_sms > MOST_COMM_SMS:
            rule = "the exchange buffer has room for so many SMs"
            raise ConfigError.of(rule, fix=f"use at most {MOST_COMM_SMS}", dbo_comm_sms=new_num_sms)
        self.library.Buffer.set_num_sms(new_num_sms)

    def get_dispatch_layout(self, topk_idx: torch.Tensor, num_experts: int, **options: Any) -> Any:
        self.world.trace.launches()
        return self.buffer.get_dispatch_layout(topk_idx, num_experts, **options)

    def dispatch(self, x: torch.Tensor, **options: Any) -> Any:
        with self._exchanges.of_rows("dispatch", x):
            return self.buffer.dispatch(x, **options)

    def combine(self, x: torch.Tensor, handle: Any, **options: Any) -> Any:
        with self._exchanges.of_rows("combine", x):
            return self.buffer.combine(x, handle, **options)
