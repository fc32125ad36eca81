"""What a rule looks at, and what a rule is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from dbo.config.facts import DeviceLimits, ModelShape
from dbo.config.options import DBOConfig


@dataclass(frozen=True, kw_only=True)
class ConfigUnderTest:
    """A configuration and what it is meant for.

    Attributes:
        capabilities: what a world can do beyond its backends' limits, see `dbo.config.rules.validate`.
    """

    config: DBOConfig
    model: ModelShape
    device: DeviceLimits
    capabilities: frozenset[str]


Rule = Callable[[ConfigUnderTest], Iterator[str]]
