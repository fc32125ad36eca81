"""The cost table of the virtual clock: microseconds for launches, kernels and transfers.

The figures are rounded from the published H200 timings and from measurements on two H200s (docs/measurements): a device
copy moves about 4.3 TB/s, a small kernel takes about 2 µs, low latency at 128 tokens and hidden 7168 takes 35 µs to
dispatch and 68 µs to combine over 8 ranks. They order things plausibly; they are not a prediction.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class CostTable:
    """All in microseconds, or bytes per microsecond.

    Attributes:
        host_launch_us: host time to queue one operation.
        host_switch_us: host time to hand the baton on.
        graph_launch_us: host time to launch a whole graph.
        kernel_us: least time of a device operation.
        memory_bytes_per_us: device memory rate.
        link_bytes_per_us: rate of one rank's link, one way.
        link_latency_us: time until the first byte of a transfer arrives.
        low_latency_send_us, low_latency_recv_us: the kernels of the two halves; the bytes travel between them.
        collective_us: least time of a collective.
        high_throughput_notify_us, high_throughput_us: DeepEP V1's count exchange, and the least time of its kernels; their
            rate is so much a SM, up to what the links carry.
        elastic_notify_us, elastic_us: the same of DeepEP V2, which moves about 2.4 times as much a SM.
        copy_engine_us, copy_engine_bytes_per_us: a peer copy.
        contention: whether compute takes longer beside exchanges of its rank; see `sim.contention`.
        copy_engine_slowdown: how much longer beside a copy engine. Measured on two H200s: 1.045 for dense products, 1.06 for
            a layer with little besides its experts (docs/measurements/predicted_gain.md).
        collective_sms: SMs that a collective's kernel occupies beside compute, without reserving them. Assumed, not
            measured: as many as DeepEP V1 takes unless told otherwise; NCCL chooses its own number.
        op_us: by its name in the trace, how long a compute operation takes alone, where that is known; others go by bytes.
    """

    host_launch_us: float = 0.1
    host_switch_us: float = 0.2
    graph_launch_us: float = 5.0
    kernel_us: float = 2.0
    memory_bytes_per_us: float = 3.5e6
    link_bytes_per_us: float = 4.0e4
    link_latency_us: float = 6.0
    low_latency_send_us: float = 4.0
    low_latency_recv_us: float = 3.0
    collective_us: float = 12.0
    high_throughput_notify_us: float = 6.0
    high_throughput_us: float = 8.0
    high_throughput_bytes_per_us_sm: Mapping[str, float] = field(
        default_factory=lambda: {"dispatch": 1.8e4, "combine": 2.0e4}
    )
    high_throughput_bytes_per_us: Mapping[str, float] = field(
        default_factory=lambda: {"dispatch": 3.35e5, "combine": 3.57e5}
    )
    elastic_notify_us: float = 3.0
    elastic_us: float = 4.0
    elastic_bytes_per_us_sm: float = 4.3e4
    elastic_bytes_per_us: float = 4.0e5
    copy_engine_us: float = 4.0
    copy_engine_bytes_per_us: float = 3.73e5
    contention: bool = True
    copy_engine_slowdown: float = 1.05
    collective_sms: int = 20
    op_us: Mapping[str, float] = field(default_factory=dict)

    def kernel(self, nbytes: int, name: str = "") -> float:
        """A device operation that touches `nbytes`; of compute also its name."""
        if name in self.op_us:
            return self.op_us[name]
        return round(self.kernel_us + nbytes / self.memory_bytes_per_us, 3)

    def transfer(self, nbytes: int) -> float:
        """`nbytes` over the link."""
        return round(self.link_latency_us + nbytes / self.link_bytes_per_us, 3)

    def collective(self, nbytes: int) -> float:
        """A collective in which one rank sends `nbytes`."""
        return round(self.collective_us + nbytes / self.link_bytes_per_us, 3)

    def high_throughput(self, op: str, nbytes: int, sms: int) -> float:
        """DeepEP V1's "dispatch" or "combine" of `nbytes` with `sms` SMs."""
        rate = min(self.high_throughput_bytes_per_us[op], sms * self.high_throughput_bytes_per_us_sm[op])
        return round(self.high_throughput_us + nbytes / rate, 3)

    def elastic(self, nbytes: int, sms: int) -> float:
        """DeepEP V2's kernel that moves `nbytes` with `sms` SMs."""
        rate = min(self.elastic_bytes_per_us, sms * self.elastic_bytes_per_us_sm)
        return round(self.elastic_us + nbytes / rate, 3)

    def copy_engine(self, nbytes: int) -> float:
        """A copy of `nbytes` into a peer's memory. It takes no SM."""
        return round(self.copy_engine_us + nbytes / self.copy_engine_bytes_per_us, 3)
