"""Mistakes that all ranks share: they agree with each other, nothing races, and the run is wrong or hides nothing. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dbo.batch.coordinate import ROW_PADDED, CommonConfig, Decision, RankColumn, decide, exchange
from dbo.engine.components import Components
from dbo.ubatching.player import SchedulePlayer
from tests.sim.job_harness import ordering_job, run, verdict_of


def never_splits(table: np.ndarray, common: CommonConfig) -> Decision:
    own = tuple(max(1, int(rows)) for rows in table[ROW_PADDED])
    decision = decide(table, common)
    if not decision.split:
        return decision
    return replace(decision, split=False, num_ubatches=1, split_points=(), num_tokens_padded=own, reason="never")


def splits_against_a_vote(table: np.ndarray, common: CommonConfig) -> Decision:
    asked = table.copy()
    asked[3] = asked[1] > 0
    return decide(asked, common)


def votes_above_the_threshold(group: Any, column: RankColumn) -> np.ndarray:
    """`>` instead of `>=`: 4 is the threshold of a prefill here."""
    return exchange(group, replace(column, vote=column.vote and column.real_tokens > 4))


@pytest.mark.parametrize(
    ("program", "lengths", "words"),
    [
        (Components(decide=never_splits), ((9, 5), (7, 6)), "is not split, though every rank votes for it"),
        (Components(decide=splits_against_a_vote), ((4,), (3,)), "is split, though not every rank votes for it"),
        (
            Components(exchange=votes_above_the_threshold),
            ((4,), (9, 5)),
            "rank 0 votes no in step 0 with 4 tokens of prefill",
        ),
    ],
    ids=["never split", "against a vote", "off by one"],
)
def test_a_decision_against_the_rules_is_found_though_all_ranks_make_it(
    program: Components, lengths: Any, words: str
) -> None:
    clean = run(ordering_job(lengths))
    assert str(verdict_of(clean).verdict) == "proved"
    report = verdict_of(run(ordering_job(lengths, programs=lambda rank: program)))
    assert report.verdict.id == "dp-disagreement"
    assert any(words in violation.sentence for violation in report.violations), report.violations


class Draining:
    """A backend whose every dispatch waits on the host for the compute stream."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def prepare_async(self, *arguments: Any) -> Any:
        self._inner._streams._world.compute.synchronize()
        return self._inner.prepare_async(*arguments)


def test_hosts_that_wait_inside_layers_hide_little_and_are_found() -> None:
    programs: Callable[[int], Components] = lambda rank: Components(prepare_finalize=Draining)  # noqa: E731
    launched = run(ordering_job(backend="nccl", programs=programs))
    assert any(not record.attrs["declared"] for record in launched.trace.of_kind("host.wait"))
    assert verdict_of(launched).verdict.id == "no-overlap"


class OneStream(SchedulePlayer):
    """Everything on the compute stream."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._streams = dict.fromkeys(self._streams, self._streams["compute"])


@pytest.mark.parametrize("backend", ["nccl", "deepep_high_throughput", "symm_copy"])
def test_exchanges_on_the_compute_stream_are_found(backend: str) -> None:
    report = verdict_of(run(ordering_job(backend=backend, programs=lambda rank: Components(player=OneStream))))
    assert report.verdict.id == "no-overlap"
    assert any("the schedule has it on the comm stream" in violation.sentence for violation in report.violations)


def test_padding_that_a_peer_of_a_group_dispatches_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peers share a batch's rows out, so the last one has the padding, and what is real is real of its share."""
    job = ordering_job(((5, 4, 4),), backend="deepep_low_latency", data_parallel_size=1, decode_context_parallel_size=2)
    clean = run(job)
    assert str(verdict_of(clean).verdict) == "proved"
    sends = [r for r in clean.trace.of_kind("send") if r.attrs["op"] == "dispatch"]
    assert {r.attrs["real"] for r in sends if r.rank == 1} != {r.attrs["real"] for r in sends if r.rank == 0}
    monkeypatch.setattr("dbo.model.skeleton.real_rows_of_peer", lambda real, rows, size, peer: -(-rows // size))
    assert verdict_of(run(job)).verdict.id == "padding-leak"
