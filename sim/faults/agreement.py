"""Faults of agreement between ranks: decisions, coordination, padding, configuration, order of collectives."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from dbo.batch.coordinate import ROW_REAL, Decision, decide
from dbo.batch.slicing import default_split_points
from dbo.engine.components import Components
from sim.faults.clean_run import CleanRun, every_rank, every_split_rank
from sim.faults.fault import Fault, Site


def local_decision(program: Components, site: Site) -> Components:
    """One rank asks itself again after the group has agreed to split, and runs the step whole."""

    def own(table: np.ndarray, common: Any) -> Decision:
        decision = decide(table, common)
        if not decision.split:
            return decision
        return replace(decision, split=False, num_ubatches=1, split_points=(), reason="not split: my own choice")

    return replace(program, decide=own)


def skip_coordination(program: Components, site: Site) -> Components:
    return replace(program, skips_step=lambda step: step == site.at)


def wrong_padding(program: Components, site: Site) -> Components:
    """One rank runs more padding than agreed."""

    def padded(table: np.ndarray, common: Any) -> Decision:
        decision = decide(table, common)
        rows = list(decision.num_tokens_padded)
        if decision.split:
            rows[site.rank] += 2
        return replace(decision, num_tokens_padded=tuple(rows))

    return replace(program, decide=padded)


def empty_ubatch(program: Components, site: Site) -> Components:
    """All ranks split eager steps although the last ubatch of one has no real token."""

    def forced(table: np.ndarray, common: Any) -> Decision:
        decision = decide(table, common)
        if decision.split or decision.all_idle or common.num_ubatches < 2 or decision.cudagraph_mode == "FULL":
            return decision
        tokens = max(decision.num_tokens_padded)
        points = default_split_points(tokens, common.num_ubatches)
        if not points or points[0] < 1 or points[-1] < min(table[ROW_REAL]):
            return decision
        return replace(
            decision,
            split=True,
            num_ubatches=common.num_ubatches,
            split_points=points,
            reason="",
            num_tokens_padded=(tokens,) * len(decision.num_tokens_padded),
        )

    return replace(program, decide=forced)


def differing_config(program: Components, site: Site) -> Components:
    def changed(config: dict[str, Any]) -> dict[str, Any]:
        return config | {"dbo_decode_token_threshold": config["dbo_decode_token_threshold"] + 1}

    return replace(program, effective_config=changed)


def every_step(run: CleanRun) -> Iterator[Site]:
    """Any step of any rank."""
    yield from (Site(rank=rank, at=step) for rank in run.ranks for step in range(run.steps))


def steps_that_would_be_empty(run: CleanRun) -> Iterator[Site]:
    """Once, if some eager step is whole although it has a token a ubatch, and a rank has too few for the last ubatch."""
    num_ubatches = int(run.trace.meta["ubatches"])
    for _, record in run.decisions:
        decision, table = record.attrs["decision"], record.attrs["table"]
        points = default_split_points(max(decision["num_tokens_padded"]), num_ubatches)
        whole = not decision["split"] and not decision["all_idle"] and decision["cudagraph_mode"] != "FULL"
        if whole and points and points[0] >= 1 and points[-1] >= min(table[ROW_REAL]):
            yield Site()
            return


_SPLIT = "a split step"

FAULTS = (
    Fault(
        name="local-decision",
        sentence="one rank acts against the shared decision",
        id="dp-disagreement",
        plant=local_decision,
        needs=_SPLIT,
        sites=every_split_rank,
        keys=("rank",),
    ),
    Fault(
        name="skip-coordination",
        sentence="one rank leaves a step's coordination out",
        id="collective-mismatch",
        plant=skip_coordination,
        needs="that step",
        sites=every_step,
        keys=("rank", "at"),
        split=False,
        defaults={"at": 1},
    ),
    Fault(
        name="wrong-padding",
        sentence="one rank pads to another count than agreed",
        id="dp-disagreement",
        plant=wrong_padding,
        needs=_SPLIT,
        sites=every_split_rank,
        keys=("rank",),
    ),
    Fault(
        name="empty-ubatch",
        sentence="steps are split although a rank's last ubatch is empty",
        id="empty-ubatch",
        plant=empty_ubatch,
        needs="a whole step, not from a graph, in which a rank has too few tokens for its last ubatch",
        sites=steps_that_would_be_empty,
        everywhere=True,
        keys=(),
    ),
    Fault(
        name="differing-config",
        sentence="one rank runs with another threshold",
        id="config",
        plant=differing_config,
        needs="nothing",
        sites=every_rank,
        keys=("rank",),
        split=False,
    ),
)
