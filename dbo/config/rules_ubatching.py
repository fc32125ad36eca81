"""What splitting a step asks for: expert parallelism, ubatches that are not empty, options that mean something."""

from __future__ import annotations

from collections.abc import Iterator

from dbo.config import facts
from dbo.config.case import ConfigUnderTest
from dbo.config.facts import BACKENDS
from dbo.config.options import DBO_ONLY_FIELDS
from dbo.errors import refusal


def dbo_needs_expert_parallelism(case: ConfigUnderTest) -> Iterator[str]:
    config = case.config
    if not config.enable_dbo:
        return
    if not config.enable_expert_parallel:
        yield refusal(
            "DBO hides the exchange between experts and needs expert parallelism",
            "add --enable-expert-parallel or pass --no-enable-dbo",
            enable_expert_parallel=False,
        )
    if config.num_ranks < 2:
        yield refusal(
            "DBO needs expert parallelism over more than one rank",
            "set --data-parallel-size 2 or more, or pass --no-enable-dbo",
            data_parallel_size=config.data_parallel_size,
            decode_context_parallel_size=config.decode_context_parallel_size,
        )


def ubatch_count(case: ConfigUnderTest) -> Iterator[str]:
    config = case.config
    if config.enable_dbo and config.num_ubatches < 2:
        yield refusal(
            "DBO cuts a step in at least two ubatches",
            "set --ubatch-size 2 or pass --no-enable-dbo",
            num_ubatches=config.num_ubatches,
        )
    most = BACKENDS[config.all2all_backend].max_ubatches
    if most is not None and config.num_ubatches > most:
        yield refusal(
            f"{config.all2all_backend} has two receive buffers and takes at most {most} ubatches",
            f"set --ubatch-size {most} or choose another --all2all-backend",
            num_ubatches=config.num_ubatches,
        )


def thresholds(case: ConfigUnderTest) -> Iterator[str]:
    config = case.config
    for name in ("dbo_decode_token_threshold", "dbo_prefill_token_threshold"):
        value = getattr(config, name)
        if config.enable_dbo and value < config.num_ubatches:
            yield refusal(
                f"{name} leaves at least one token a ubatch",
                f"raise it to {config.num_ubatches}",
                **{name: value},
                num_ubatches=config.num_ubatches,
            )
        if (
            config.enable_dbo
            and config.all2all_backend == facts.LOW_LATENCY
            and name in config.explicit
            and value > config.low_latency_max_tokens_per_rank
        ):
            yield refusal(
                f"{name} is reachable, so it is at most the tokens of a low-latency call",
                f"lower it to {config.low_latency_max_tokens_per_rank} or choose another --all2all-backend",
                **{name: value},
                low_latency_max_tokens_per_rank=config.low_latency_max_tokens_per_rank,
            )


def options_of_dbo(case: ConfigUnderTest) -> Iterator[str]:
    config = case.config
    if config.enable_dbo:
        return
    for name in DBO_ONLY_FIELDS:
        given = config.split_points is not None if name == "split_points" else name in config.explicit
        if given and name != "num_ubatches":
            yield refusal(
                f"{name} means something only when DBO is on",
                "add --enable-dbo or drop the option",
                **{name: getattr(config, name)},
                enable_dbo=False,
            )


def split_points(case: ConfigUnderTest) -> Iterator[str]:
    config = case.config
    if config.split_points is None or not config.enable_dbo:
        return
    if len(config.split_points) != config.num_ubatches - 1:
        yield refusal(
            "split_points are one fewer than the ubatches",
            f"give {config.num_ubatches - 1} of them or change --ubatch-size",
            split_points=config.split_points,
            num_ubatches=config.num_ubatches,
        )
    if config.split_points and config.split_points[-1] >= config.max_num_batched_tokens:
        yield refusal(
            "the last split point lies before the end of the largest step",
            f"lower it below {config.max_num_batched_tokens}",
            split_points=config.split_points,
            max_num_batched_tokens=config.max_num_batched_tokens,
        )
