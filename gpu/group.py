"""Communicators (needs torch): a `torch.distributed` process group behind the contract's `Group`.

Host-level collectives run over gloo; `all_to_all_single` runs over the group of the data's device, NCCL or gloo. Every
exchange is on the board before it begins, so that the watchdog knows who came to which one, and as whose.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from dbo.errors import NotAvailable
from dbo.trace import kinds
from gpu.watch import flight_recorder as board

if TYPE_CHECKING:
    from gpu.device import GpuWorld


class DistGroup:
    """One rank's end of a communicator over all ranks.

    Args:
        name: of the communicator, as reports show it; one of `gpu.watch.flight_recorder.GROUPS`.
        process_group: the torch one.
    """

    def __init__(self, world: GpuWorld, name: str, process_group: Any) -> None:
        self.world = world
        self.name = name
        self.process_group = process_group
        self.rank = world.rank
        self.size = world.size
        self._exchanges = Exchanges(world, name)

    # -- host level -------------------------------------------------------------------------------------------------

    def all_reduce(self, table: np.ndarray, *, tag: int) -> np.ndarray:
        with self._host_collective("all_reduce", list(table.shape), str(table.dtype), tag):
            total = torch.from_numpy(np.ascontiguousarray(table).copy())
            dist.all_reduce(total, group=self.process_group)
        return total.numpy()

    def all_gather_object(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.size
        with self._host_collective("all_gather_object", [], "object", -1):
            dist.all_gather_object(values, value, group=self.process_group)
        return values

    @contextmanager
    def _host_collective(self, op: str, shape: list[int], dtype: str, tag: int) -> Iterator[None]:
        index = self.world.next_index(self.name)
        recorder = self.world.trace
        recorder.end_visit(recorder.task)
        attrs = {
            "group": self.name,
            "index": index,
            "op": op,
            "shape": shape,
            "dtype": dtype,
            "tag": tag,
            "ranks": self.size,
        }
        recorder.on_line(kinds.COLLECTIVE, op, attrs)
        recorder.came(self.name, index, op)
        recorder.waits(board.COLLECTIVE, f"collective {op}", self.name, index)
        with self.world.peers_may_fail():
            yield
        recorder.goes_on()
        recorder.has_met(self.name, index)

    # -- device level -----------------------------------------------------------------------------------------------

    def all_to_all_single(
        self, output: Any, input: Any, output_split_sizes: Sequence[int], input_split_sizes: Sequence[int]
    ) -> None:
        if self.process_group is None:
            rule = "NCCL refuses two ranks on one device"
            fix = "use a DeepEP V1 backend with --share-device, one device a rank, or --device cpu"
            raise NotAvailable.of(rule, fix=fix, group=self.name, device=self.world.device)
        with self._exchanges.of_rows("all_to_all_single", input):
            # As bytes: gloo has no 16-bit types, and no backend looks at what it moves.
            dist.all_to_all_single(
                rows_as_bytes(output),
                rows_as_bytes(input),
                list(output_split_sizes),
                list(input_split_sizes),
                group=self.process_group,
            )


class Exchanges:
    """Numbers the device exchanges of one communicator, and puts each on the board and in the trace.

    Args:
        name: one of `gpu.watch.flight_recorder.GROUPS`, or of a DCP group.
        members: its ranks; None: all.
    """

    def __init__(self, world: GpuWorld, name: str, members: Sequence[int] | None = None) -> None:
        self.world = world
        self.name = name
        everybody = members is None or len(members) == world.size
        self._ranks = world.size if members is None or everybody else list(members)

    @contextmanager
    def exchange(self, op: str, signature: dict[str, Any]) -> Iterator[None]:
        """Around launching this rank's part of an exchange on the current stream.

        Where a stream's work runs at once, the call inside blocks until all ranks have come.
        """
        index = self.world.next_index(self.name)
        recorder = self.world.trace
        place = {"group": self.name, "index": index, "op": op}
        recorder.device(
            kinds.COLLECTIVE, op, attrs={**place, **signature, "tag": list(recorder.task.tags), "ranks": self._ranks}
        )
        recorder.came(self.name, index, op)
        recorder.waits(board.COLLECTIVE, f"collective {op}", self.name, index)
        record = recorder.device(kinds.EXCHANGE, op, attrs=place, after=(recorder.meet_reference(self.name, index),))
        with self.world.peers_may_fail():
            yield
        recorder.goes_on()
        if self.world.measures:
            recorder.timed(record)

    def of_rows(self, op: str, rows: torch.Tensor) -> AbstractContextManager[None]:
        """`exchange` of rows `[N, H]`, whose number may differ from rank to rank."""
        return self.exchange(op, {"shape": [int(rows.shape[-1])], "dtype": str(rows.dtype)})


def rows_as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """`[N, …]` as `[N, bytes of a row]`, the same memory."""
    rows, row_bytes = tensor.shape[0], tensor.element_size() * prod(tensor.shape[1:])
    if not tensor.numel():
        return tensor.new_empty((rows, row_bytes), dtype=torch.uint8)  # strides of nothing mean nothing
    return tensor.view(torch.uint8).view(rows, row_bytes)
