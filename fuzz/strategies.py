"""Hypothesis strategies for whole runs: sizes, schedules, requests and faults, never scheduling steps.

clean_cases()           a configuration that is accepted, a schedule that is valid for it, requests for every rank
planted_cases(fault)    the same with one fault, at a site where it comes into effect
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from hypothesis import assume
from hypothesis import strategies as st

from dbo import config as configuration
from dbo.config import IMPLEMENTED
from dbo.config.facts import DCP_COMM_BACKENDS, SHARED_EXPERTS
from dbo.errors import ScheduleError
from dbo.schedule import Item, LayerProgram, Point, RunRecvHook, Schedule, Yield, presets, validate
from fuzz.case import Case, RequestPlan
from fuzz.spelling import BACKENDS
from fuzz.targets import clean_twin
from sim.faults import CATALOGUE, Fault

MAX_PROMPT = 14
MAX_TOKEN = 60  # characters
_SIDES = ("S", "D.recv", "C.recv", "copy")  # points that may run on either stream where the backend has two


def backends() -> st.SearchStrategy[str]:
    """A backend that the simulator has."""
    return st.sampled_from(sorted(set(BACKENDS.values()) & IMPLEMENTED["sim"]["all2all_backend"]))


@st.composite
def schedules(
    draw: st.DrawFn, backend: str, num_ubatches: int, wanted: Callable[[Sequence[Item]], bool] = lambda items: True
) -> Schedule:
    """A schedule that the validator accepts: a preset after up to three mutations, each kept only if it is accepted.

    Args:
        wanted: the presets to start from, by their items.
    """
    usable = [s for s in presets().values() if backend in s.backends and _accepted(s, backend, num_ubatches)]
    preset = draw(st.sampled_from([s for s in usable if wanted(s.program(backend).items)] or usable))
    schedule = _alone(preset.program(backend).items, preset.offset, backend)
    for _ in range(draw(st.integers(0, 3))):
        changed = draw(mutations(schedule))
        if _accepted(changed, backend, num_ubatches):
            schedule = changed
    return schedule


@st.composite
def mutations(draw: st.DrawFn, schedule: Schedule) -> Schedule:
    """One small change of a schedule: drop, insert, swap or move an item, another stream, another offset."""
    items = list(schedule.items)
    backend = schedule.backends[0]
    at = draw(st.integers(0, len(items) - 1))
    match draw(st.sampled_from(["drop", "yield", "hook", "swap", "move", "stream", "offset"])):
        case "drop":
            del items[at]
        case "yield":
            items.insert(at, Yield())
        case "hook":
            items.insert(at, RunRecvHook())
        case "swap":
            items[at - 1], items[at] = items[at], items[at - 1]
        case "move":
            items.insert(draw(st.integers(0, len(items) - 1)), items.pop(at))
        case "stream":
            item = items[at]
            if isinstance(item, Point) and item.name in _SIDES:
                items[at] = Point(item.name, "compute" if item.stream == "comm" else "comm")
        case "offset":
            return _alone(tuple(items), draw(st.integers(0, 3)), backend)
    return _alone(tuple(items), schedule.offset, backend)


@st.composite
def opening(draw: st.DrawFn, ranks: int, ubatches: int, budget: int) -> list[list[int]]:
    """Prompt lengths by rank whose first step every rank can split: no rank's last ubatch is empty."""
    rows = draw(st.integers(2 * ubatches, max(2 * ubatches, min(budget, MAX_PROMPT))))
    least = rows // ubatches * (ubatches - 1) + 1
    return [draw(_parts(draw(st.integers(least, rows)))) for _ in range(ranks)]


@st.composite
def _parts(draw: st.DrawFn, total: int) -> list[int]:
    """Positive integers that sum to `total`, at most three."""
    cuts = sorted(draw(st.sets(st.integers(1, total - 1), max_size=2)))
    return [b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True)]


def later_requests(most: int) -> st.SearchStrategy[list[RequestPlan]]:
    """At most `most` requests that come at any time; some are aborted."""
    plan = st.builds(
        RequestPlan,
        prompt_tokens=st.integers(1, MAX_PROMPT),
        new_tokens=st.integers(1, 3),
        arrives=st.sampled_from([1, 1, 2, 3, 4, 0]),
        aborted=st.none() | st.integers(1, 6),
    )
    return st.lists(plan, max_size=most)


@st.composite
def requests(
    draw: st.DrawFn, ranks: int, ubatches: int, budget: int, *, small: bool, decode: bool = False
) -> tuple[tuple[RequestPlan, ...], ...]:
    """Requests by replica: mostly a first step that splits, then whatever comes; some replicas idle from the start.

    Args:
        decode: the first ones decode at least once: only such steps run from graphs.
    """
    found: list[list[RequestPlan]] = [[] for _ in range(ranks)]
    if draw(st.integers(0, 7)):
        for rank, lengths in enumerate(draw(opening(ranks, ubatches, budget))):
            found[rank] = [
                RequestPlan(prompt_tokens=n, new_tokens=draw(st.integers(1 + decode, 2 if small else 4)))
                for n in lengths
            ]
    for rank in range(ranks):
        found[rank] += draw(later_requests(0 if small else 2))
    if not any(found):
        found[0].append(RequestPlan(prompt_tokens=draw(st.integers(1, MAX_PROMPT)), new_tokens=1))
    return tuple(map(tuple, found))


@st.composite
def clean_cases(
    draw: st.DrawFn,
    backends: st.SearchStrategy[str] = backends(),  # noqa: B008 (a value)
    wanted: Callable[[Sequence[Item]], bool] = lambda items: True,
    *,
    small: bool = False,
    exchanges: Sequence[str] = (),
) -> Case:
    """A whole run without a fault, in ordering mode, whose token is at most `MAX_TOKEN` long.

    Args:
        wanted: as for `schedules`.
        small: shallow and short, for runs with numbers.
        exchanges: those that a DCP group may use; empty: any, and mostly no group.
    """
    backend = draw(backends)
    replicas, dcp_size = draw(layouts(small=small, group=bool(exchanges)))
    ranks = replicas * dcp_size
    most = configuration.BACKENDS[backend].max_ubatches or 3
    ubatches = draw(st.sampled_from([u for u in (2, 2, 3) if u <= most]))
    experts = ranks * draw(st.integers(1, 3))
    batched = draw(st.integers(2 * ubatches, 24))
    max_seqs = draw(st.sampled_from([4, 3, 2, 1]))
    graphs, capture_sizes = draw(_graphs(max_seqs, batched))
    plans = draw(requests(replicas, ubatches, batched, small=small, decode=graphs))
    schedule = draw(schedules(backend, ubatches, wanted))
    block_size = draw(st.integers(1, 9))
    at_first = min(sum(p.prompt_tokens for p in replica if not p.arrives) for replica in plans)
    longest = max(plan.prompt_tokens + plan.new_tokens for replica in plans for plan in replica)
    least_blocks = 1 + -(-longest // (block_size * dcp_size))
    case = Case(
        backend=backend,
        ranks=ranks,
        ubatches=ubatches,
        dense_layers=draw(st.integers(0, 1)),
        moe_layers=draw(st.integers(1, 2 if small else 4)),
        experts=experts,
        top_k=draw(st.integers(1, min(experts, 4))),
        decode_threshold=draw(st.integers(ubatches, min(ubatches + 3, batched))),
        prefill_threshold=draw(st.integers(ubatches, max(ubatches, min(at_first, batched)))),
        max_batched_tokens=batched,
        max_seqs=max_seqs,
        block_size=block_size,
        num_kv_blocks=least_blocks + draw(st.integers(0, 3 * least_blocks)),
        split_points=draw(_split_points(ubatches, batched)),
        graphs=graphs,
        capture_sizes=capture_sizes,
        dcp_size=dcp_size,
        dcp_backend=draw(st.sampled_from(sorted(exchanges or DCP_COMM_BACKENDS))) if dcp_size > 1 else None,
        interleave=draw(_divisors(block_size)) if dcp_size > 1 else 1,
        shared_experts=draw(st.sampled_from(_placements())),
        items=schedule.items,
        offset=schedule.offset,
        requests=plans,
    )
    assume(len(case.token) <= MAX_TOKEN)
    return case


@st.composite
def layouts(draw: st.DrawFn, *, small: bool, group: bool) -> tuple[int, int]:
    """DP replicas and ranks of a DCP group; one in three runs has groups, and each where `group`."""
    if group or draw(st.integers(0, 2)) == 2:
        return draw(st.sampled_from(((1, 2), (2, 2), (1, 3)) if small else ((1, 2), (2, 2), (1, 3), (1, 4))))
    return draw(st.integers(2, 3 if small else 4)), 1


def _divisors(block_size: int) -> st.SearchStrategy[int]:
    """A block holds whole interleave runs."""
    return st.sampled_from([n for n in range(1, block_size + 1) if block_size % n == 0])


def _placements() -> list[str]:
    """Of the shared experts; most runs have the schedule's."""
    return ["overlap", *(name for name in SHARED_EXPERTS if name in IMPLEMENTED["sim"]["shared_experts"])]


@st.composite
def _graphs(draw: st.DrawFn, max_seqs: int, batched: int) -> tuple[bool, tuple[int, ...] | None]:
    """One run in three has graphs: of the sizes that follow, or of explicit ones that reach the largest decode step."""
    if draw(st.integers(0, 2)) < 2:
        return False, None
    if draw(st.integers(0, 3)) < 3:
        return True, None
    largest = draw(st.integers(max_seqs, min(batched, max_seqs + 4)))
    return True, tuple(sorted({largest, *draw(st.sets(st.integers(1, largest), max_size=3))}))


def _split_points(ubatches: int, batched: int) -> st.SearchStrategy[tuple[int, ...] | None]:
    """Mostly equal parts; else explicit points near the start, so that steps reach beyond them."""
    points = st.sets(st.integers(1, min(batched - 1, 5)), min_size=ubatches - 1, max_size=ubatches - 1)
    explicit = points.map(lambda found: tuple(sorted(found)))
    return st.integers(0, 7).flatmap(lambda pick: explicit if pick == 7 else st.none())


def _yields_behind_a_producer(items: Sequence[Item]) -> bool:
    """Attention or the experts stand directly in front of a yield, so that their event could be late."""
    pairs = zip(items, items[1:], strict=False)
    return any(isinstance(b, Yield) and isinstance(a, Point) and a.name in ("A1", "MLP") for a, b in pairs)


# Where few schedules offer what a fault breaks: presets to start from. What it needs is still read from the clean run.
_FAVOURED: Mapping[str, Callable[[Sequence[Item]], bool]] = {
    "late-event": _yields_behind_a_producer,
    "late-capture": _yields_behind_a_producer,
}


@st.composite
def planted_cases(
    draw: st.DrawFn, faults: Sequence[Fault] = CATALOGUE, mode: str = "ordering", *, small: bool = False
) -> Case:
    """A run with one fault out of `faults`, at a site where the clean run offers it something to break.

    Args:
        mode: of the run; faults that break what only numbers have are planted in numeric mode in any case.
        small: as for `clean_cases`; runs with numbers are small in any case.
    """
    fault = draw(st.sampled_from(list(faults)))
    wanted = backends().filter(lambda name: not fault.backends or name in fault.backends)
    mode = "numeric" if fault.numeric else mode
    favoured = _FAVOURED.get(fault.name, lambda items: True)
    case = draw(clean_cases(wanted, favoured, small=small or mode == "numeric", exchanges=fault.exchanges))
    if mode == "numeric" and fault.split:
        # Ranks decide alike with and without numbers, and a run without them is ten times cheaper to reject.
        assume(clean_twin(case)[0].split_slices)
    case = dataclasses.replace(case, fault=fault.name, mode=mode)
    sites = list(fault.sites(clean_twin(case)[0]))
    assume(sites)
    case = dataclasses.replace(case, fault=fault.inject(draw(st.sampled_from(sites))))
    assume(len(case.token) <= MAX_TOKEN)
    return case


def _alone(items: tuple[Item, ...], offset: int, backend: str) -> Schedule:
    return Schedule(name="fuzzed", backends=(backend,), programs=(LayerProgram(items=items),), offset=offset)


def _accepted(schedule: Schedule, backend: str, num_ubatches: int) -> bool:
    try:
        validate(schedule, backend=backend, num_ubatches=num_ubatches)
    except ScheduleError:
        return False
    return True
