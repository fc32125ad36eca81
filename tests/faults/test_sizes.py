"""Sizes that a step can reach and that nobody reserved, or captured."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from dbo.batch.coordinate import Common, vote
from dbo.check import judge
from dbo.config import DBOConfig, capture_ladder, profile_shapes, require_profiled
from dbo.engine.components import Components
from dbo.errors import ConfigError
from dbo.trace import Trace
from sim.world import SimWorld
from tests.faults.pair import Pair, busy, check_pair, decided, ended, ring_step, run
from tests.sim.job_harness import ordering_job
from tests.sim.job_harness import run as run_job

# -- memory profiled with split steps only: vllm#52176 ----------------------------------------------------------------

CONFIG = DBOConfig(data_parallel_size=2, enable_expert_parallel=True, enable_dbo=True, max_num_batched_tokens=8192)

Shapes = Callable[[DBOConfig], Sequence[Sequence[int]]]


def split_only(config: DBOConfig) -> Sequence[Sequence[int]]:
    """Profiling splits the largest batch, as a step of that size would be split."""
    return [shape for shape in profile_shapes(config) if len(shape) > 1]


def largest_forward(shapes: Sequence[Sequence[int]]) -> int:
    return max(rows for shape in shapes for rows in shape)


def profiled(tokens: Sequence[int], shapes_of: Shapes = profile_shapes) -> Trace:
    """Reserve for the largest forward that was profiled; then run one step."""

    def program(world: SimWorld) -> None:
        own = tokens[world.rank]
        world.trace.host("reserve", what="rows", slot="forward", size=largest_forward(shapes_of(CONFIG)))
        votes = vote(CONFIG, num_tokens=own, uniform_decode=False)
        decision = decided(world, busy(0, own, vote=votes), CONFIG)
        rows = decision.num_tokens_padded[world.rank]
        if decision.split:
            for part in (decision.split_points[0], rows - decision.split_points[0]):
                world.trace.host("use", what="rows", slot="forward", size=part)
            ring_step(world, [lambda w: None] * 2, begin=False)
        else:
            world.trace.host("use", what="rows", slot="forward", size=rows)
            ended(world)

    return run(program, ranks=2)


def whole_run(profile: Shapes = profile_shapes) -> Trace:
    """The same through the whole program of two ranks: prompts of 8192 tokens and of one."""
    job = ordering_job(
        ((8192,), (1,)),
        new_tokens=1,
        max_num_batched_tokens=8192,
        max_model_len=8200,
        block_size=64,
        num_kv_blocks=256,
        model={"max_position_embeddings": 8200},
        programs=lambda rank: Components(profile=profile),
    )
    return run_job(job).trace


# -- a ladder that misses its end: vllm#40734 -------------------------------------------------------------------------

MAX_TOKENS, STRIDE = 700, 16


def multiples_only(max_tokens: int, *, stride: int) -> tuple[int, ...]:
    """The configured maximum is no multiple of the stride."""
    return tuple(range(stride, max_tokens + 1, stride))


def decoded(tokens: Sequence[int], ladder: Callable[..., tuple[int, ...]] = capture_ladder) -> Trace:
    """A step in which every request decodes one token, and all ranks want a graph."""
    common = Common(num_ubatches=1, cudagraph_capture_sizes=ladder(MAX_TOKENS, stride=STRIDE))

    def program(world: SimWorld) -> None:
        decided(world, busy(0, tokens[world.rank], query_len=1, full=True), common)
        ended(world)

    return run(program, ranks=len(tokens))


PAIRS = [
    Pair(
        case="vllm-project/vllm#52176",
        id="capacity",
        uses="dbo.config.profile_shapes",
        buggy=lambda: profiled([8192, 1], split_only),
        fixed=lambda: profiled([8192, 1]),
        culprit={"rank": 0, "step": 0},
        says=("rows forward", "used up to 8192", "reserved are 4096"),
    ),
    Pair(
        case="vllm-project/vllm#52176",
        name="whole run",
        id="capacity",
        uses="dbo.config.profile_shapes",
        buggy=lambda: whole_run(split_only),
        fixed=whole_run,
        culprit={"rank": 0, "step": 0},
        says=("rows forward", "used up to 8192", "reserved are 4096"),
    ),
    Pair(
        case="vllm-project/vllm#40734",
        id="no-overlap",
        uses="dbo.config.capture_ladder",
        buggy=lambda: decoded([700], multiples_only),
        fixed=lambda: decoded([700]),
        culprit={"rank": 0, "step": 0},
        says=("700 tokens runs without a graph",),
    ),
    Pair(
        case="vllm-project/vllm#40734",
        name="two ranks",
        id="no-overlap",
        uses="dbo.config.capture_ladder",
        buggy=lambda: decoded([700, 680], multiples_only),
        fixed=lambda: decoded([700, 680]),
        culprit={"rank": 0, "step": 0},
        says=("700 tokens runs without a graph",),
    ),
]


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_pair(pair: Pair) -> None:
    check_pair(pair)


@pytest.mark.parametrize(
    "tokens", [(8192, 8192), (8192, 4097), (8192, 4096), (8192, 512), (8192, 1), (1, 1), (600, 600)]
)
def test_no_step_exceeds_what_was_profiled(tokens: tuple[int, int]) -> None:
    assert judge(profiled(tokens)).verdict.text == "proved"


def test_the_profile_of_halves_is_enough_exactly_when_the_step_is_split() -> None:
    assert judge(profiled([8192, 4097], split_only)).verdict.text == "proved"
    assert judge(profiled([8192, 4096], split_only)).verdict.text == "violated(capacity)"
    with pytest.raises(ConfigError, match="profiled_tokens=4096, max_num_batched_tokens=8192"):
        require_profiled(CONFIG, largest_forward(split_only(CONFIG)))
    require_profiled(CONFIG, largest_forward(profile_shapes(CONFIG)))


@pytest.mark.parametrize("max_tokens", [1, 2, 15, 16, 17, 688, 700, 704])
def test_no_size_up_to_the_maximum_falls_off_the_ladder(max_tokens: int) -> None:
    ladder = capture_ladder(max_tokens, stride=STRIDE)
    assert all(any(size >= tokens for size in ladder) for tokens in range(1, max_tokens + 1))
    assert max(ladder) == max_tokens


def test_a_multiple_of_the_stride_hides_the_missing_end() -> None:
    assert multiples_only(MAX_TOKENS, stride=STRIDE)[-1] == 688
    assert judge(decoded([688, 680], multiples_only)).verdict.text == "proved"
