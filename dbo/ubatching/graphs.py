"""Captured steps of one rank: keys, capture in a declared phase, replay without threads.

key       everything that changes the captured program; put and get use the same function
capture   one warm-up run, then the same call inside a graph; what it read stays in place as the step's inputs
replay    copy this step's inputs over the captured ones, launch the graph, hand out the captured output
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

from dbo.config import DBOConfig
from dbo.contract.world import World
from dbo.errors import CaptureError
from dbo.trace import kinds
from dbo.ubatching.forward_context import ForwardContext


@dataclass(frozen=True, kw_only=True)
class GraphKey:
    """What two steps must have in common to share a graph.

    Attributes:
        num_tokens: padded rows of each ubatch; one entry when the step is not split.
        num_reqs: padded requests of each ubatch.
        query_len: uniform query length.
        dtype, backend, schedule, comm_sms, dcp_size: of the configuration.
    """

    num_tokens: tuple[int, ...]
    num_reqs: tuple[int, ...]
    query_len: int
    dtype: str
    backend: str
    schedule: str
    comm_sms: int
    dcp_size: int

    def __str__(self) -> str:
        tokens = "+".join(map(str, self.num_tokens))
        return f"{tokens} tokens, {'+'.join(map(str, self.num_reqs))} requests of {self.query_len}"


def graph_key(
    config: DBOConfig, schedule: str, *, num_tokens: Sequence[int], num_reqs: Sequence[int], query_len: int
) -> GraphKey:
    """The key of a step with these (u)batches."""
    return GraphKey(
        num_tokens=tuple(num_tokens),
        num_reqs=tuple(num_reqs),
        query_len=query_len,
        dtype=config.dtype,
        backend=config.all2all_backend,
        schedule=schedule,
        comm_sms=config.dbo_comm_sms,
        dcp_size=config.decode_context_parallel_size,
    )


@dataclass(kw_only=True)
class CapturedStep:
    """A graph with what it reads and writes; all of it lives as long as the graph."""

    graph: Any
    arguments: dict[str, Any]
    metadata: list[Any]
    output: Any


def _program(context: ForwardContext) -> dict[str, list[int]]:
    """What the step launches, read from the batch itself and not from its key: rows and prefills of each (u)batch."""
    slices, metadata = context.ubatch_slices, context.ubatch_metadata or ()
    rows = [context.num_tokens] if slices is None else [s.num_tokens for s in slices]
    parts = [context.attn_metadata] if slices is None else metadata
    return {"num_tokens": rows, "num_prefills": [sum(map(bool, getattr(m, "is_prefilling", ()))) for m in parts]}


class StepGraphs:
    """The captured steps of one rank.

    Attributes:
        staging: entered around a capture with the graph's name: memory handed out inside belongs to the graph.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.steps: dict[GraphKey, CapturedStep] = {}
        self.capturing = False
        self.staging: Callable[[str], AbstractContextManager[Any]] = nullcontext

    def capture(self, context: ForwardContext, arguments: Mapping[str, Any], run: Callable[[], Any]) -> None:
        """Warm up with `run` and capture it under the context's key. A capture that fails keeps neither graph nor output.

        Raises:
            CaptureError: outside the capture phase, or the program did what a capture forbids.
        """
        key = context.graph_key
        if not self.capturing:
            rule = "graphs are captured in the capture phase only"
            raise CaptureError.of(rule, fix="call GPUModelRunner.capture_graphs before the first step", key=key)
        run()
        context.step -= 1  # the capture is another run than its warm-up
        graph = self.world.new_graph(str(key))
        with self.staging(str(key)), graph.capture():
            output = run()
        self._tell(kinds.GRAPH_PUT, context)
        metadata = [context.attn_metadata] if context.ubatch_slices is None else list(context.ubatch_metadata or ())
        self.steps[key] = CapturedStep(graph=graph, arguments=dict(arguments), metadata=metadata, output=output)

    def _tell(self, kind: str, context: ForwardContext) -> None:
        if self.world.trace.keeps:
            key = context.graph_key
            self.world.trace.host(kind, str(key), key=asdict(key), program=_program(context))

    def replay(self, context: ForwardContext, arguments: Mapping[str, Any]) -> Any:
        """Run the step of this context from its graph; the output is valid until the next replay of the same key.

        Raises:
            CaptureError: no graph was captured for the key.
        """
        key = context.graph_key
        self._tell(kinds.GRAPH_GET, context)
        step = self.steps.get(key)
        if step is None:
            rule = "a step that all ranks run as a graph has been captured"
            known = "; ".join(str(k) for k in self.steps) or "none"
            raise CaptureError.of(rule, fix="capture it first", key=key, captured=known)
        for name, value in arguments.items():
            self.world.tensors.copy_into(step.arguments[name], value)
        fresh = [context.attn_metadata] if context.ubatch_slices is None else context.ubatch_metadata or ()
        real = []
        for captured, metadata in zip(step.metadata, fresh, strict=True):
            real.append(metadata.num_actual_tokens)
            copy = getattr(captured, "copy_device_", None)
            if copy is not None:
                copy(metadata)
        step.graph.replay(context.real_tokens or real)
        return step.output
