"""Sizes that follow from a configuration: graph ladders, batches that a step can reach, low-latency buffers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dbo.errors import ConfigError

if TYPE_CHECKING:
    from dbo.config.options import DBOConfig

LADDER_STRIDE_TOKENS = 16
_SMALL_SIZES = (1, 2, 4, 8)
_BUFFER_ALIGNMENT_BYTES = 128


def capture_ladder(max_tokens: int, *, stride: int = LADDER_STRIDE_TOKENS) -> tuple[int, ...]:
    """Sizes to capture, in tokens: a few small ones, multiples of `stride`, and always `max_tokens` itself.

    A ladder that stops at the last multiple below the maximum makes exactly the fullest step run without a graph.
    """
    sizes = {s for s in _SMALL_SIZES if s < max_tokens} | set(range(stride, max_tokens, stride)) | {max_tokens}
    return tuple(sorted(sizes))


def queue_pair_max_tokens(queue_pair_depth: int) -> int:
    """Most tokens a low-latency call may carry: each needs two work requests, and one pair stays free."""
    return queue_pair_depth // 2 - 1


def low_latency_size_hint_bytes(*, max_tokens_per_rank: int, hidden_size: int, num_ranks: int, num_experts: int) -> int:
    """Bytes of the low-latency buffer of one rank, as the library itself would ask for.

    Two of everything (calls alternate): a send area, a receive area with room for every rank's maximum at every local
    expert, and one counter an expert. A dispatch message is a 16-byte header and the bf16 row, or the fp8 row with one
    scale per 128 elements, whichever is longer; a combine message is the bf16 row and 4 bytes per 128 elements.
    """
    blocks = hidden_size // 128
    dispatch_msg = 16 + max(2 * hidden_size, hidden_size + 4 * blocks)
    combine_msg = 4 * blocks + 2 * hidden_size
    local_experts = num_experts // num_ranks
    receive = local_experts * num_ranks * max_tokens_per_rank * max(dispatch_msg, combine_msg)
    send = max(max_tokens_per_rank * dispatch_msg, num_experts * max_tokens_per_rank * combine_msg)
    counters = -(-num_experts * 4 // _BUFFER_ALIGNMENT_BYTES) * _BUFFER_ALIGNMENT_BYTES
    total = 2 * (send + receive + counters)
    return (total + _BUFFER_ALIGNMENT_BYTES) // _BUFFER_ALIGNMENT_BYTES * _BUFFER_ALIGNMENT_BYTES


def profile_shapes(config: DBOConfig) -> tuple[tuple[int, ...], ...]:
    """Token counts to profile before memory is reserved; each entry lists the ubatches that are alive together.

    A split step and the whole batch are both reachable: a step falls back to one batch as soon as one rank vetoes.
    """
    whole = config.max_num_batched_tokens
    if not config.enable_dbo:
        return ((whole,),)
    points = config.split_points or tuple(k * (whole // config.num_ubatches) for k in range(1, config.num_ubatches))
    bounds = (0, *points, whole)
    return ((whole,), tuple(b - a for a, b in zip(bounds, bounds[1:], strict=False)))


def require_profiled(config: DBOConfig, profiled_tokens: int) -> None:
    """Refuse a memory profile that is smaller than a step that the scheduler can reach.

    Args:
        profiled_tokens: token rows of the largest single forward that was profiled.

    Raises:
        ConfigError: some reachable step runs more rows.
    """
    if profiled_tokens < config.max_num_batched_tokens:
        raise ConfigError.of(
            "memory is profiled for the largest step that can run, the unsplit one",
            fix="profile every entry of profile_shapes(config)",
            profiled_tokens=profiled_tokens,
            max_num_batched_tokens=config.max_num_batched_tokens,
        )
