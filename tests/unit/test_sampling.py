"""Sampling: greedy and its ties, draws that depend on the request alone, top-k, top-p, and rows nobody computed."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dbo.engine.sampling import SamplingParams, sample, sample_token, uniform
from dbo.errors import EngineError, UsageError


@dataclass(frozen=True, kw_only=True)
class Row:
    request_id: str
    sampling: SamplingParams = field(default_factory=SamplingParams)
    output_index: int = 0


def logits(*rows: list[float]) -> np.ndarray:
    return np.array(rows, dtype=np.float32)


def tokens_seen(row: np.ndarray, params: SamplingParams, draws: int = 300) -> set[int]:
    return {sample_token(row, params, request_id="r", output_index=i) for i in range(draws)}


def test_greedy_takes_the_largest_and_on_a_tie_the_lowest_index() -> None:
    rows = logits([0, 3, 1, 3], [-1, -5, -1, -2], [-np.inf, -np.inf, 0, -np.inf])
    assert sample(rows, [Row(request_id="a"), Row(request_id="b"), Row(request_id="c")]) == {"a": 1, "b": 0, "c": 2}


def test_a_token_depends_neither_on_the_other_rows_nor_on_their_order() -> None:
    rng = np.random.default_rng(0)
    rows_NV = rng.standard_normal((8, 50), dtype=np.float32)
    hot = SamplingParams(temperature=1.5, seed=7)
    requests = [Row(request_id=f"r{i}", sampling=hot, output_index=i) for i in range(8)]
    together = sample(rows_NV, requests)
    alone = {k: v for i in reversed(range(8)) for k, v in sample(rows_NV[i : i + 1], [requests[i]]).items()}
    assert together == alone


@pytest.mark.parametrize("change", [{"seed": 8}, {"request_id": "s"}, {"output_index": 1}])
def test_seed_request_and_position_each_change_the_draw(change: dict[str, object]) -> None:
    base: dict[str, object] = {"seed": 7, "request_id": "r", "output_index": 0}
    assert uniform(*base.values()) != uniform(*(base | change).values())  # type: ignore[arg-type]


def test_the_draw_is_the_same_in_every_process_and_version() -> None:
    assert uniform(7, "r", 0) == 0.20565385117810386


def test_draws_follow_the_probabilities() -> None:
    probabilities = np.array([0.1, 0.2, 0.3, 0.4])
    row = np.log(probabilities).astype(np.float32)
    params = SamplingParams(temperature=1.0, seed=1)
    n = 4000
    counts = np.bincount([sample_token(row, params, request_id="r", output_index=i) for i in range(n)], minlength=4)
    # Chi-squared with 3 degrees of freedom: above 16.3 once in a thousand; the draws are fixed, so this cannot flake.
    assert ((counts - n * probabilities) ** 2 / (n * probabilities)).sum() < 16.3


def test_a_higher_temperature_flattens() -> None:
    row = logits([0, 2])[0]
    ones = [
        sum(sample_token(row, SamplingParams(temperature=t), request_id="r", output_index=i) for i in range(500))
        for t in (0.3, 1.0, 50.0)
    ]
    assert ones[0] > ones[1] > ones[2] > 200


def test_top_k_keeps_the_k_largest_and_on_a_tie_the_lowest_indices() -> None:
    assert tokens_seen(logits([1, 2, 2, 2])[0], SamplingParams(temperature=5, top_k=2)) == {1, 2}
    assert tokens_seen(logits([1, 2, 3])[0], SamplingParams(temperature=5, top_k=9)) == {0, 1, 2}
    many = np.tile(np.array([0, 1], dtype=np.float32), 20)
    assert tokens_seen(many, SamplingParams(temperature=5, top_k=3)) == {1, 3, 5}


def test_top_p_keeps_the_fewest_that_reach_it() -> None:
    row = np.log(np.array([0.5, 0.3, 0.2], dtype=np.float32))
    assert tokens_seen(row, SamplingParams(temperature=1, top_p=0.4)) == {0}
    assert tokens_seen(row, SamplingParams(temperature=1, top_p=0.7)) == {0, 1}
    assert tokens_seen(row, SamplingParams(temperature=1, top_p=0.9)) == {0, 1, 2}


def test_top_p_counts_after_top_k_and_temperature() -> None:
    row = np.log(np.array([0.5, 0.3, 0.2], dtype=np.float32))
    # Of the two kept, the first has 0.5 / 0.8 = 0.625 of the mass.
    assert tokens_seen(row, SamplingParams(temperature=1, top_k=2, top_p=0.6)) == {0}
    assert tokens_seen(row, SamplingParams(temperature=100, top_k=2, top_p=0.6)) == {0, 1}


def test_a_tiny_temperature_is_greedy_and_overflows_nowhere() -> None:
    with np.errstate(all="raise"):
        assert tokens_seen(logits([1e30, -1e30, 5])[0], SamplingParams(temperature=1e-300), draws=20) == {0}


@settings(deadline=None)
@given(
    row=st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=20),
    temperature=st.floats(0, 10),
    top_k=st.integers(0, 25),
    top_p=st.floats(0, 1, exclude_min=True),
    index=st.integers(0, 1000),
)
def test_a_sampled_token_is_one_of_the_top_k(
    row: list[float], temperature: float, top_k: int, top_p: float, index: int
) -> None:
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
    row_V = np.array(row, dtype=np.float32)
    token = sample_token(row_V, params, request_id="r", output_index=index)
    larger = int((row_V > row_V[token]).sum())
    assert larger < (1 if params.greedy else top_k or len(row))


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=1.0)])
@pytest.mark.parametrize("bad", [[1, np.nan, 2], [-np.inf, -np.inf, -np.inf], [0, np.inf, 1]])
def test_a_row_that_was_never_computed_is_refused_by_request(params: SamplingParams, bad: list[float]) -> None:
    with pytest.raises(EngineError, match="request=poisoned"):
        sample(logits(bad), [Row(request_id="poisoned", sampling=params)])


def test_rows_and_requests_must_agree_in_number() -> None:
    with pytest.raises(EngineError, match="logits=2, requests=1"):
        sample(logits([1, 2], [3, 4]), [Row(request_id="a")])


@pytest.mark.parametrize(
    "bad", [{"temperature": -1.0}, {"temperature": float("nan")}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.1}]
)
def test_values_outside_their_range_are_refused_by_name(bad: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=next(iter(bad))):
        SamplingParams(**bad)  # type: ignore[arg-type]
