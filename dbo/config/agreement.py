"""Ranks run one program only if they were told the same: canonical configurations, and where they differ."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dbo.errors import ConfigError

if TYPE_CHECKING:
    from dbo.config.options import DBOConfig

RANK_LOCAL_FIELDS: frozenset[str] = frozenset({"num_kv_blocks"})
"""Fields in which ranks may differ: a rank's cache is as large as its memory allows. Ranks of one DCP group may not:
they hold shares of the same requests."""

_ABSENT = "<absent>"


def effective(config: DBOConfig) -> dict[str, Any]:
    """The configuration after defaults were derived, JSON-able, fields in alphabetical order, without rank-local ones.

    The captured sizes are listed instead of the option that may or may not have named them.
    """
    hidden = {"explicit", "capture_sizes"} | (RANK_LOCAL_FIELDS if config.decode_context_parallel_size == 1 else set())
    values = {f.name: getattr(config, f.name) for f in dataclasses.fields(config) if f.name not in hidden}
    values["cudagraph_capture_sizes"] = config.cudagraph_capture_sizes
    return {name: list(v) if isinstance(v, tuple) else v for name, v in sorted(values.items())}


def compare_configs(configs: Sequence[Mapping[str, Any]]) -> None:
    """Compare the effective configurations of all ranks, in rank order.

    Raises:
        ConfigError: the first field, in alphabetical order, in which ranks differ, with every value and its ranks.
            All ranks see the same list, so all raise the same sentence.
    """
    for name in sorted(set().union(*configs)):
        ranks_of: dict[str, list[int]] = {}
        for rank, config in enumerate(configs):
            ranks_of.setdefault(repr(config.get(name, _ABSENT)), []).append(rank)
        if len(ranks_of) > 1:
            shown = ", ".join(f"{value} on {_ranks(ranks)}" for value, ranks in ranks_of.items())
            raise ConfigError.of(
                "all ranks run one configuration", fix="start every rank with the same options", **{name: shown}
            )


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ",".join(map(str, ranks))
