"""An error anywhere ends its step on every rank in a bounded number of ticks, and the next step works.

Every case runs the whole program twice: clean, and with one raise. The raise happens once, so the failed step is run
again by the next one, and in the end every request has all of its tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from dbo.engine.components import Components
from dbo.engine.runner import StepOutcome
from dbo.errors import PeerFailed, UBatchError
from dbo.job.rank import MOST_FAILURES, SPARE_STEPS, RankJob
from dbo.moe.modular_kernel import FusedMoEModularKernel
from dbo.schedule import Item, Point
from dbo.ubatching.player import SchedulePlayer
from dbo.ubatching.ring import UBatchContext, dbo_current_ubatch_id, dbo_enabled
from sim.world import SimRun
from tests.sim.job_harness import ordering_job, outcomes_of, run, tokens_of, verdict_of


class Broken(Exception):
    """What the planted raises raise."""


class Once:
    """Raises when it is first asked to."""

    def __init__(self, words: str) -> None:
        self.words = words
        self.left = True

    def __call__(self) -> None:
        if self.left:
            self.left = False
            raise Broken(self.words)


def in_segment(ubatch: int, segment: int) -> Components:
    """Raise in the segment behind yield number `segment` of a ubatch: at its first point, else when the layer ends."""
    bang = Once(f"segment {segment}")

    class Raising(SchedulePlayer):
        def _next(self, layer: int) -> Item:
            item = super()._next(layer)
            if isinstance(item, Point) and self.context.index == ubatch and self.context.yields == segment:
                bang()
            return item

        def play(self, thunks: dict[str, Any], *, layer: int) -> None:
            super().play(thunks, layer=layer)
            if self.context.index == ubatch and self.context.yields == segment:
                bang()

    return Components(player=Raising)


def at_yield(ubatch: int, index: int) -> Components:
    """Raise instead of handing the baton on."""
    bang = Once(f"yield {index}")

    class Raising(UBatchContext):
        def yield_(self) -> None:
            if self.index == ubatch and self.yields == index:
                bang()
            super().yield_()

    return Components(context=Raising)


def after_yield(ubatch: int, index: int) -> Components:
    """Raise as soon as the baton is back."""
    bang = Once(f"after yield {index}")

    class Raising(UBatchContext):
        def yield_(self) -> None:
            super().yield_()
            if self.index == ubatch and self.yields == index + 1:
                bang()

    return Components(context=Raising)


def in_hook(owner: int, number: int) -> Components:
    """The `number`-th receive hook of `owner` raises, in the thread of whoever runs it."""
    bang = Once(f"hook {number}")

    class Raising(UBatchContext):
        registered = 0

        def register_recv_hook(self, hook: Callable[[], None]) -> None:
            mine, self.registered = self.registered, self.registered + 1

            def raising() -> None:
                if self.index == owner and mine == number:
                    bang()
                hook()

            super().register_recv_hook(raising)

    return Components(context=Raising)


def at_exit(ubatch: int) -> Components:
    """Raise where a leaving context runs what is pending with it."""
    bang = Once("exit")

    class Raising(UBatchContext):
        leaving = False

        def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
            self.leaving = True
            super().__exit__(kind, error, traceback)

        def run_recv_hook(self) -> None:
            super().run_recv_hook()
            if self.leaving and self.index == ubatch:
                bang()

    return Components(context=Raising)


def before_barrier(ubatch: int) -> Components:
    bang = Once("before the barrier")
    return Components(before_ubatch=lambda index: bang() if index == ubatch else None)


def before_first_yield(ubatch: int) -> Components:
    """In the model itself, in front of everything that the schedule plays."""
    bang = Once("model")

    class Raising(SchedulePlayer):
        def reach(self, point: str, *, layer: int) -> None:
            if self.context.index == ubatch:
                bang()
            super().reach(point, layer=layer)

    return Components(player=Raising)


def both_raise(first: int) -> Components:
    """Each ubatch raises, `first` in the segment before the other's."""
    bangs = [Once("first"), Once("second")]

    class Raising(UBatchContext):
        def yield_(self) -> None:
            try:
                if self.index == first and self.yields == 1:
                    bangs[0]()
                super().yield_()
            except BaseException:
                if self.index != first:
                    bangs[1]()
                raise

    return Components(context=Raising)


# -- what must hold ---------------------------------------------------------------------------------------------------

CLEAN: dict[str, SimRun] = {}


def clean_of(name: str, job: RankJob) -> SimRun:
    """The same job without a fault, run once."""
    if name not in CLEAN:
        CLEAN[name] = run(job)
    return CLEAN[name]


def planted(job: RankJob, program: Components, rank: int) -> SimRun:
    return run(replace(job, program_of=lambda r: program if r == rank else Components()))


def errors_of(outcomes: list[StepOutcome]) -> list[BaseException]:
    return [o.error for o in outcomes if o.error is not None]


def first_cause(error: BaseException) -> BaseException:
    return error.__cause__ if isinstance(error, UBatchError) and error.__cause__ is not None else error


def check_ended_and_recovered(launched: SimRun, clean: SimRun, *, rank: int, ubatch: int, words: str) -> None:
    """What an error in a step promises (docs/design.md, section 4), one by one."""
    assert not launched.deadlocked
    assert launched.ticks <= 2 * clean.ticks, "a failed step costs at most its own repetition"
    for own, outcomes in enumerate(outcomes_of(launched)):
        (error,) = errors_of(outcomes)
        if own != rank:
            cause = first_cause(error)
            assert isinstance(cause, PeerFailed) and cause.rank == rank, f"rank {own} saw {error!r}"
        elif ubatch >= 0:
            assert isinstance(error, UBatchError) and (error.rank, error.ubatch) == (rank, ubatch), repr(error)
            assert isinstance(error.__cause__, Broken) and str(error.__cause__) == words
        else:
            assert isinstance(error, Broken) and str(error) == words
    ends = list(launched.trace.of_kind("step.end"))
    assert [e.attrs["live_threads"] for e in ends] == [0] * len(ends)
    assert sum(e.attrs["status"] == "error" for e in ends) == len(launched.values)
    assert tokens_of(launched) == tokens_of(clean), "the steps after the failed one"
    report = verdict_of(launched, expect_raise=True)
    assert report.verdict.good, report.violations


RINGS = {
    "deepep_low_latency": (2, 2, ordering_job(backend="deepep_low_latency")),
    "nccl": (2, 3, ordering_job(backend="nccl")),
    "nccl, mlp_shared_overlap": (2, 2, ordering_job(backend="nccl", schedule="mlp_shared_overlap")),
    "nccl, 3 ubatches": (3, 3, ordering_job(backend="nccl", num_ubatches=3, dbo_decode_token_threshold=3)),
}
LAYERS = 2
PLACES = [
    (ring, ubatch, segment)
    for ring, (ubatches, yields, _) in RINGS.items()
    for ubatch in range(ubatches)
    for segment in range(LAYERS * yields + 1)
]


@pytest.mark.parametrize(("ring", "ubatch", "segment"), PLACES)
def test_a_raise_in_any_segment_of_any_ubatch(ring: str, ubatch: int, segment: int) -> None:
    job = RINGS[ring][2]
    launched = planted(job, in_segment(ubatch, segment), rank=1)
    check_ended_and_recovered(launched, clean_of(ring, job), rank=1, ubatch=ubatch, words=f"segment {segment}")


@pytest.mark.parametrize("plant", [at_yield, after_yield])
@pytest.mark.parametrize("ring", RINGS)
def test_a_raise_at_each_yield(ring: str, plant: Callable[[int, int], Components]) -> None:
    ubatches, yields, job = RINGS[ring]
    for ubatch in range(ubatches):
        for index in range(LAYERS * yields):
            launched = planted(job, plant(ubatch, index), rank=0)
            words = f"yield {index}" if plant is at_yield else f"after yield {index}"
            check_ended_and_recovered(launched, clean_of(ring, job), rank=0, ubatch=ubatch, words=words)


@pytest.mark.parametrize("owner", [0, 1])
@pytest.mark.parametrize("number", range(2 * LAYERS))
def test_a_raise_in_a_hook_is_the_error_of_the_ubatch_that_runs_it(owner: int, number: int) -> None:
    job = RINGS["deepep_low_latency"][2]
    launched = planted(job, in_hook(owner, number), rank=1)
    clean = clean_of("deepep_low_latency", job)
    (runner,) = {
        r.attrs["runner"]
        for r in launched.trace.of_kind("hook.run")
        if r.rank == 1
        and r.attrs["owner"] == owner
        and r.step == 0
        and r.id == max(x.id for x in launched.trace.of_kind("hook.run") if x.rank == 1 and x.step == 0)
    }
    check_ended_and_recovered(launched, clean, rank=1, ubatch=runner, words=f"hook {number}")


@pytest.mark.parametrize("ubatch", [0, 1])
@pytest.mark.parametrize(
    ("plant", "words"),
    [(at_exit, "exit"), (before_barrier, "before the barrier"), (before_first_yield, "model")],
)
@pytest.mark.parametrize("ring", RINGS)
def test_a_raise_outside_the_segments(ring: str, plant: Callable[[int], Components], words: str, ubatch: int) -> None:
    job = RINGS[ring][2]
    launched = planted(job, plant(ubatch), rank=1)
    check_ended_and_recovered(launched, clean_of(ring, job), rank=1, ubatch=ubatch, words=words)


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("ring", RINGS)
def test_when_both_raise_the_first_error_is_the_one_that_is_raised(ring: str, first: int) -> None:
    job = RINGS[ring][2]
    launched = planted(job, both_raise(first), rank=0)
    check_ended_and_recovered(launched, clean_of(ring, job), rank=0, ubatch=first, words="first")


# -- dead peers -------------------------------------------------------------------------------------------------------


def _outside(seam: str) -> Components:
    """Raise in the rank's main task: before the coordination, behind it, or where slices are made."""
    bang = Once(seam)
    original = getattr(Components(), seam)

    def raising(*args: Any, **kwargs: Any) -> Any:
        bang()
        return original(*args, **kwargs)

    return replace(Components(), **{seam: raising})


@pytest.mark.parametrize("seam", ["exchange", "decide", "make_slices", "slice_plan"])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("ring", ["deepep_low_latency", "nccl"])
def test_a_rank_that_raises_outside_ubatches(ring: str, rank: int, seam: str) -> None:
    job = RINGS[ring][2]
    launched = planted(job, _outside(seam), rank=rank)
    check_ended_and_recovered(launched, clean_of(ring, job), rank=rank, ubatch=-1, words=seam)


@pytest.mark.parametrize("backend", ["deepep_low_latency", "nccl"])
def test_a_rank_that_raises_in_a_whole_step(backend: str) -> None:
    """DBO off: the model raises in the rank's main task, in the middle of its exchanges."""
    bang = Once("whole step")

    class Raising(FusedMoEModularKernel):
        def forward(self, *args: Any, layer: int, **kwargs: Any) -> Any:
            if layer == 2:
                bang()
            return super().forward(*args, layer=layer, **kwargs)

    job = ordering_job(backend=backend, enable_dbo=False)
    launched = planted(job, Components(kernel=Raising), rank=1)
    check_ended_and_recovered(launched, clean_of(f"{backend} whole", job), rank=1, ubatch=-1, words="whole step")


@pytest.mark.parametrize("backend", ["deepep_low_latency", "nccl"])
@pytest.mark.parametrize("rank", range(4))
def test_all_other_ranks_of_four_see_the_same_peer_failed(backend: str, rank: int) -> None:
    job = ordering_job(((9, 5), (7, 6), (4, 8), (5, 5)), backend=backend)
    launched = planted(job, in_segment(1, 2), rank=rank)
    check_ended_and_recovered(launched, clean_of(f"{backend} 4", job), rank=rank, ubatch=1, words="segment 2")


@pytest.mark.parametrize("backend", ["deepep_low_latency", "nccl"])
def test_two_ranks_that_raise_in_the_same_step(backend: str) -> None:
    job = ordering_job(backend=backend)
    launched = run(replace(job, program_of=lambda rank: before_barrier(rank)))
    assert not launched.deadlocked and launched.ticks <= 2 * clean_of(backend, job).ticks
    for rank, outcomes in enumerate(outcomes_of(launched)):
        (error,) = errors_of(outcomes)
        assert isinstance(error, UBatchError) and (error.rank, error.ubatch) == (rank, rank)
        assert isinstance(error.__cause__, Broken), "each keeps its own error, not the other's failure"
    assert tokens_of(launched) == tokens_of(clean_of(backend, job))


@pytest.mark.parametrize("backend", ["deepep_low_latency", "nccl"])
def test_one_error_after_another(backend: str) -> None:
    """Each of the first three steps fails somewhere else."""
    bangs = {(0, 0): Once("a"), (1, 1): Once("b"), (2, 0): Once("c")}

    def program_of(rank: int) -> Components:
        class Raising(SchedulePlayer):
            def reach(self, point: str, *, layer: int) -> None:
                bang = bangs.get((self.context.forward_context.step, rank))
                if bang is not None and self.context.index == dbo_current_ubatch_id() == rank:
                    bang()
                super().reach(point, layer=layer)

        return Components(player=Raising)

    job = ordering_job(backend=backend)
    launched = run(replace(job, program_of=program_of))
    assert not launched.deadlocked
    failed = [[o.step for o in outcomes if o.error is not None] for outcomes in outcomes_of(launched)]
    assert failed == [[0, 1, 2], [0, 1, 2]]
    assert tokens_of(launched) == tokens_of(clean_of(backend, job))
    assert verdict_of(launched, expect_raise=True).verdict.good


@pytest.mark.parametrize("vehicle", ["greenlet", "thread"])
@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_what_ends_the_process_ends_the_run_and_not_the_step(vehicle: str, stop: type[BaseException]) -> None:
    def before_ubatch(index: int) -> None:
        if index == 1:
            raise stop("now")

    job = ordering_job(programs=lambda rank: Components(before_ubatch=before_ubatch))
    with pytest.raises(stop, match="now"):
        run(job, vehicle=vehicle)


def test_a_run_whose_every_step_fails_ends_and_is_no_proof() -> None:
    def before_ubatch(index: int) -> None:
        raise Broken("always")

    launched = run(ordering_job(programs=lambda rank: Components(before_ubatch=before_ubatch)))
    assert [len(rank) for rank in outcomes_of(launched)] == [MOST_FAILURES] * 2
    assert not verdict_of(launched).verdict.good


def test_a_run_has_steps_for_all_that_its_requests_need() -> None:
    job = ordering_job(((9, 5), (7, 6)), new_tokens=3)
    assert job.most_steps == SPARE_STEPS + (9 + 3) + (5 + 3)
    assert replace(job, max_steps=4).most_steps == 4


@pytest.mark.parametrize("times", [1, 100], ids=["once", "always"])
def test_an_error_in_a_step_that_is_not_split_is_found_too(times: int) -> None:
    left = [times]

    class Raising(FusedMoEModularKernel):
        def parts(self, *arguments: Any, **more: Any) -> Any:
            if not dbo_enabled() and left[0]:
                left[0] -= 1
                raise Broken("unsplit")
            return super().parts(*arguments, **more)

    job = ordering_job(dbo_decode_token_threshold=64, dbo_prefill_token_threshold=64)
    launched = planted(job, Components(kernel=Raising), rank=0)
    report = verdict_of(launched)
    assert report.verdict.id == "swallowed-error"
    assert "rank 0 raised Broken: unsplit" in report.violations[0].sentence
