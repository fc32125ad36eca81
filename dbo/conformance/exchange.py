"""Cases of the conformance suite with numbers (needs torch): tensors, and exchanges with integer-coded payloads.

Every row carries its origin in its values (rank, row), small enough to be exact in bf16, so that a row that arrives at
the wrong place, twice, or not at all changes an integer. Shapes: T tokens of this rank, H hidden size, K experts a
token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from dbo.config import DBOConfig
from dbo.conformance.suite import require
from dbo.moe.interface import ExpertInputs, summed
from dbo.ubatching.forward_context import ForwardContext, override_forward_context

HIDDEN = 2048
EXPERTS_A_RANK = 4
TOP_K = 2
MOST_TOKENS = 16


def exchange_cases(backends: Sequence[str]) -> list[tuple[str, Callable[[Any], None]]]:
    """(name, case) for tensors, and for each backend each shape of traffic."""
    cases: list[tuple[str, Callable[[Any], None]]] = [("tensors_travel_to_the_device_and_back", tensors_travel)]
    if "nccl" in backends:
        cases.append(("all_to_all_single_moves_rows", all_to_all_moves_rows))
    for backend in backends:
        cases += [
            (f"{backend}_round_trip_{name}", partial(round_trip, backend, traffic)) for name, traffic in TRAFFIC.items()
        ]
    return cases


def tensors_travel(world: Any) -> None:
    """Arrays keep their values and dtypes; rows, cat and take are what they are in numpy."""
    tensors = world.tensors
    for dtype in (np.int32, np.int64, np.float32):
        array = np.arange(24, dtype=dtype).reshape(6, 4)
        there = tensors.from_numpy(array, "array")
        back = tensors.to_host(there, "conformance")
        require(np.array_equal(back, array) and back.dtype == dtype, f"{dtype.__name__} comes back as it went")
    index = np.array([4, 0, 0], dtype=np.int64)
    taken = tensors.to_host(tensors.take(there, index), "conformance")
    require(np.array_equal(taken, array[index]), "take picks rows")
    halves = [tensors.rows(there, 0, 3), tensors.rows(there, 3, 6)]
    joined = tensors.to_host(tensors.cat(halves), "conformance")
    require(np.array_equal(joined, array), "rows and cat are inverse")
    zeros = tensors.zeros((2, 3), torch.float32)
    require(not tensors.to_host(zeros, "conformance").any(), "zeros are zeros")
    tensors.copy_into(zeros, tensors.from_numpy(np.full((2, 3), 7, dtype=np.float32), "sevens"))
    require((tensors.to_host(zeros, "conformance") == 7).all(), "copy_into overwrites")
    tensors.record_stream(zeros, world.comm)


def all_to_all_moves_rows(world: Any) -> None:
    """Uneven splits, a pair that exchanges nothing, 16-bit rows; on both streams."""
    ranks, me = world.size, world.rank
    sizes = [[(3 * source + peer) % 4 for peer in range(ranks)] for source in range(ranks)]
    sizes[0][ranks - 1] = 0
    mine, theirs = sizes[me], [sizes[source][me] for source in range(ranks)]
    for stream, dtype in ((world.compute, torch.float32), (world.comm, torch.bfloat16), (world.compute, torch.int64)):
        world.set_stream(stream)
        rows = [[100 * me + 10 * peer + i, me, peer] for peer in range(ranks) for i in range(mine[peer])]
        sent = world.tensors.from_numpy(np.array(rows, dtype=np.float32).reshape(-1, 3) % 128, "sent").to(dtype)
        got = torch.empty((sum(theirs), 3), dtype=dtype, device=sent.device)
        world.group.all_to_all_single(got, sent, theirs, mine)
        expected = [[100 * source + 10 * me + i, source, me] for source in range(ranks) for i in range(theirs[source])]
        found = world.tensors.to_host(got, "conformance")
        wanted = np.array(expected, dtype=np.float32).reshape(-1, 3) % 128
        require(np.array_equal(found, wanted), f"rows of {dtype} by source: {found.tolist()}")
    world.set_stream(world.compute)


def _odd(rank: int, ranks: int) -> tuple[int, Callable[[int, int], int]]:
    return 2 * rank + 3, lambda row, k: (5 * row + 3 * k + rank) % (EXPERTS_A_RANK * ranks)


def _zero_on_one(rank: int, ranks: int) -> tuple[int, Callable[[int, int], int]]:
    return (0 if rank == 0 else 5), lambda row, k: (row + k * (EXPERTS_A_RANK + 1)) % (EXPERTS_A_RANK * ranks)


def _skewed(rank: int, ranks: int) -> tuple[int, Callable[[int, int], int]]:
    """Everybody's rows go to the last rank's last experts: the others receive nothing."""
    return MOST_TOKENS, lambda row, k: EXPERTS_A_RANK * ranks - 1 - k


def _padded(rank: int, ranks: int) -> tuple[int, Callable[[int, int], int]]:
    """The last rows are padding: id -1, values that nobody may see."""
    return 7, lambda row, k: -1 if row >= 4 else (row + 2 * k + rank) % (EXPERTS_A_RANK * ranks)


TRAFFIC: dict[str, Callable[[int, int], tuple[int, Callable[[int, int], int]]]] = {
    "odd_counts": _odd,
    "zero_tokens_on_one_rank": _zero_on_one,
    "maximal_skew": _skewed,
    "padding_rows": _padded,
}
"""Who sends what: (rank, ranks) -> tokens of that rank, and (row, k) -> expert id."""


def round_trip(backend: str, traffic: Any, world: Any) -> None:
    """Dispatch, experts that multiply by their number plus one, combine with weights 1: exact, row by row."""
    from dbo.job.rank import make_prepare_finalize

    ranks = world.size
    counts = [traffic(rank, ranks)[0] for rank in range(ranks)]
    tokens, expert_of = traffic(world.rank, ranks)
    ids = np.array([[expert_of(t, k) for k in range(TOP_K)] for t in range(tokens)], dtype=np.int64).reshape(-1, TOP_K)
    values = (np.arange(tokens) + 1)[:, None] * np.where(np.arange(HIDDEN) % 2, 1.0, -1.0)[None]
    values[(ids < 0).all(1)] = np.nan
    x = world.tensors.from_numpy(values.astype(np.float32), "x").to(torch.bfloat16)
    topk_ids = world.tensors.from_numpy(ids, "topk_ids")
    weights = world.tensors.from_numpy(np.ones(ids.shape, dtype=np.float32), "topk_weights")
    options: dict[str, Any] = {"low_latency_max_tokens_per_rank": MOST_TOKENS}
    config = DBOConfig(
        data_parallel_size=ranks,
        enable_expert_parallel=True,
        all2all_backend=backend,
        max_num_batched_tokens=64,
        **(options if backend == "deepep_low_latency" else {}),
    )
    exchange = _prepare_finalize_of(world, config, make_prepare_finalize)
    context = ForwardContext(
        attn_metadata=None, num_tokens=tokens, num_real_tokens=tokens, num_tokens_across_ranks=counts
    )
    with override_forward_context(context):
        world.at_point("D.send", layer=0)
        arrived = _complete(exchange.prepare_async(x, weights, topk_ids))
        world.at_point("MLP", layer=0)
        answered = _experts(arrived, world)
        world.at_point("C.send", layer=0)
        combined = summed(_complete(exchange.finalize_async(answered, weights, topk_ids)))
    found = world.tensors.to_host(combined, "conformance")
    factors = np.where(ids >= 0, ids % EXPERTS_A_RANK + 1, 0).sum(1)
    real = (ids >= 0).any(1)
    wanted = factors[real, None] * values[real]
    require(np.array_equal(found[real], wanted), f"{int((found[real] != wanted).any(1).sum())} rows of {tokens} differ")


def _prepare_finalize_of(world: Any, config: DBOConfig, make: Callable[..., Any]) -> Any:
    """The backend as a rank builds it; only the number of experts is asked of the model."""

    class Sizes:
        n_routed_experts = EXPERTS_A_RANK * world.size
        hidden_size = HIDDEN
        num_experts_per_tok = TOP_K

    return make(world, config, Sizes)


def _complete(started: Any) -> Any:
    """Run an exchange to its end in this task."""
    if isinstance(started, tuple):
        hook, receive = started
        hook()
        return receive()
    return started()


def _experts(inputs: ExpertInputs, world: Any) -> Any:
    """Local expert e multiplies by e + 1."""
    if inputs.layout == "batched":
        scale = torch.arange(1, EXPERTS_A_RANK + 1, device=inputs.x.device, dtype=inputs.x.dtype)
        return inputs.x * scale[:, None, None]
    ids = inputs.topk_ids
    factors = ((ids + 1) * inputs.topk_weights * (ids >= 0)).sum(-1, keepdim=True)
    rows = torch.where(
        (ids >= 0).any(-1, keepdim=True), inputs.x, torch.zeros((), dtype=inputs.x.dtype, device=ids.device)
    )
    return (rows.float() * factors).to(inputs.x.dtype)
