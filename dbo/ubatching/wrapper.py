"""`UBatchWrapper`: called like the model; runs it plainly, or once per ubatch in U threads round the ring.

Threads are made once. Each step installs in every ubatch thread what the caller's thread has (context variables, grad
and inference mode, …: `World.task_state`) and removes it at the step's end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dbo.batch.slicing import UBatchSlice
from dbo.contract.world import TaskState, World
from dbo.dcp.interface import real_rows_of_peer, rows_of_peer
from dbo.engine.components import Components
from dbo.errors import DBOError, RingError, UBatchError, Unwinding
from dbo.schedule import Schedule
from dbo.trace import kinds
from dbo.ubatching.forward_context import ForwardContext, get_forward_context, override_forward_context
from dbo.ubatching.graphs import StepGraphs
from dbo.ubatching.ring import Ring, UBatchContext, make_ubatch_contexts

# Keyword arguments of the model that have a row per token, cut along axis 0. All others reach every ubatch unchanged.
TOKEN_ARGUMENTS = frozenset({"input_ids", "positions", "inputs_embeds"})


class UBatchWrapper:
    """Wraps a model for one rank.

    Args:
        model: called with keyword arguments only; returns an array `[T, …]`, or a tuple, list or dict of them.
        world: the rank's world.
        schedule, backend: what the ubatches play.
        moe_layers: layers that the schedule is played for.
        program: exchangeable pieces.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        *,
        world: World,
        schedule: Schedule,
        backend: str,
        moe_layers: Sequence[int],
        program: Components | None = None,
    ) -> None:
        self.model = model
        self.world = world
        self.schedule = schedule
        self.backend = backend
        self.moe_layers = tuple(moe_layers)
        self.program = program or Components()
        self.graphs = StepGraphs(world)
        self._workers: list[Any] = []
        self._at_work: set[int] = set()

    @property
    def live_threads(self) -> int:
        """Ubatch threads that are still at work: none between two steps, whatever happened in them."""
        return len(self._at_work)

    def __call__(self, **kwargs: Any) -> Any:
        """Run the step that the current forward context describes.

        Raises:
            UBatchError: a ubatch raised; the first error is its cause. All threads have ended the step.
        """
        context = get_forward_context()
        if context.graph_key is not None:
            return self.graphs.replay(context, kwargs)
        return self._step(context, kwargs)

    def capture(self, **kwargs: Any) -> None:
        """Capture the step that the current forward context describes, threads and all; see `dbo.ubatching.graphs`.

        Raises:
            CaptureError: outside the capture phase, or the program did what a capture forbids; nothing is left behind.
        """
        context = get_forward_context()
        self.graphs.capture(context, kwargs, lambda: self._step(context, kwargs))

    def _step(self, context: ForwardContext, kwargs: dict[str, Any]) -> Any:
        """Run the step eagerly, or into an open capture."""
        if context.ubatch_slices is None:
            self._tell_real_rows(context)
            return self.model(**kwargs)
        slices: Sequence[UBatchSlice] = context.ubatch_slices
        arguments = [self._cut(kwargs, s, context.num_tokens) for s in slices]
        contexts = self._contexts(context, slices)
        outputs = self._run(contexts, arguments)
        return self._join(outputs)

    def run_serially(self, **kwargs: Any) -> Any:
        """The same slices one after another in the calling thread: what DBO must be bit-equal to."""
        context = get_forward_context()
        outputs = []
        for index, piece in enumerate(context.ubatch_slices):
            part = self._forward_context(context, index, piece)
            with override_forward_context(part):
                self._tell_real_rows(part)
                outputs.append(self.model(**self._cut(kwargs, piece, context.num_tokens)))
        return self._join(outputs)

    def _tell_real_rows(self, context: ForwardContext) -> None:
        """What of this rank's dispatches is real; a peer of a DCP group dispatches a share of the rows."""
        real, size = context.num_real_tokens, context.dcp_size
        if size > 1:
            real = real_rows_of_peer(real, context.num_tokens, size, self.world.rank % size)
        self.world.set_real_tokens(real)

    # -- one split step ---------------------------------------------------------------------------------------------

    def _contexts(self, context: ForwardContext, slices: Sequence[UBatchSlice]) -> list[UBatchContext]:
        world = self.world
        forwards = [self._forward_context(context, i, s) for i, s in enumerate(slices)]
        contexts = make_ubatch_contexts(
            len(slices),
            world.compute,
            world.comm,
            forwards,
            world.host.barrier(len(slices) + 1, "ready"),
            world=world,
            context_class=self.program.context,
        )
        for ubatch in contexts:
            ubatch.forward_context.player = self.program.player(
                ubatch, self.schedule, backend=self.backend, moe_layers=self.moe_layers
            )
        return contexts

    def _forward_context(self, context: ForwardContext, index: int, piece: UBatchSlice) -> ForwardContext:
        assert context.ubatch_metadata is not None
        metadata = context.ubatch_metadata[index]
        return ForwardContext(
            attn_metadata=metadata,
            kv_caches=context.kv_caches,
            num_tokens=piece.num_tokens,
            num_real_tokens=metadata.num_actual_tokens,
            ubatch=index,
            player=context.player,
            step=context.step,
            num_tokens_across_ranks=[rows_of_peer(piece.num_tokens, context.dcp_size)] * self.world.size,
            dcp_size=context.dcp_size,
            graph_key=context.graph_key,
        )

    def _run(self, contexts: list[UBatchContext], arguments: list[dict[str, Any]]) -> list[Any]:
        ring = contexts[0].ring
        while len(self._workers) < len(contexts):
            self._workers.append(self.world.host.worker(f"u{len(self._workers)}"))
        workers = self._workers[: len(contexts)]
        outputs: list[Any] = [None] * len(contexts)
        state = self.world.task_state()
        for index, worker in enumerate(workers):
            self._at_work.add(index)
            worker.submit(lambda i=index: self._work(state, ring, contexts[i], arguments[i], outputs))
        try:
            contexts[0].ready_barrier.wait()
        except RingError:
            pass  # a ubatch failed before it came; its error is in the ring, and the barrier has let everybody go
        else:
            contexts[0].start()
        for worker in workers:
            worker.join()
        self.world.trace.host(kinds.JOIN)
        if ring.error is not None:
            raise UBatchError(rank=self.world.rank, ubatch=ring.error_ubatch, cause=ring.error)
        return outputs

    def _work(
        self, state: TaskState, ring: Ring, context: UBatchContext, arguments: dict[str, Any], outputs: list[Any]
    ) -> None:
        """What a worker does: the ubatch, under what the step's caller has set. Never raises, as `_ubatch`."""
        try:
            state.run(self._ubatch, ring, context, arguments, outputs)
        except Unwinding:
            return
        except BaseException as error:  # what the caller has set cannot be set here: the ubatch has not begun
            ring.fail(context.index, error)
            context.ready_barrier.abort()
            self._at_work.discard(context.index)

    def _ubatch(self, ring: Ring, context: UBatchContext, arguments: dict[str, Any], outputs: list[Any]) -> None:
        """One ubatch's share of the step, in its own thread. Never raises: the ring holds the error."""
        index = context.index
        self.world.in_ubatch(index, step=context.forward_context.step)  # also what fails before the ring is this step's
        try:
            self.program.before_ubatch(index)
            self._tell_real_rows(context.forward_context)
            with context:
                outputs[index] = self.model(**arguments)
        except Unwinding:
            return
        except RingError as error:
            if not context.ready_barrier.aborted:
                ring.fail(index, error)
                context.ready_barrier.abort()
        except BaseException as error:  # also KeyboardInterrupt in a ubatch: the step's caller gets it
            ring.fail(index, error)
            context.ready_barrier.abort()
        finally:
            self._at_work.discard(index)

    # -- arguments and results --------------------------------------------------------------------------------------

    def _cut(self, kwargs: Mapping[str, Any], piece: UBatchSlice, num_tokens: int) -> dict[str, Any]:
        tokens = piece.token_slice
        cut = {}
        for name, value in kwargs.items():
            rows = getattr(value, "shape", None)
            if name in TOKEN_ARGUMENTS and value is not None:
                cut[name] = self.world.tensors.rows(value, tokens.start, tokens.stop)
            elif rows and rows[0] == num_tokens:
                rule = "an argument with a row per token is declared, so that it is cut"
                raise DBOError.of(rule, fix="add it to TOKEN_ARGUMENTS", argument=name, shape=tuple(rows))
            else:
                cut[name] = value
        return cut

    def _join(self, outputs: Sequence[Any]) -> Any:
        """The ubatches' results in order, along axis 0."""
        first = outputs[0]
        if isinstance(first, dict):
            return {key: self._join([o[key] for o in outputs]) for key in first}
        if isinstance(first, (tuple, list)):
            joined = [self._join(parts) for parts in zip(*outputs, strict=True)]
            return type(first)(*joined) if hasattr(first, "_fields") else type(first)(joined)
        if hasattr(first, "shape"):
            return self.world.tensors.cat(outputs)
        rule = "a model returns arrays, or tuples, lists or dicts of them"
        raise DBOError.of(rule, fix="return the rows only", type=type(first).__name__)
