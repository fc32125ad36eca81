"""How much is drawn: Hypothesis profiles, chosen by HYPOTHESIS_PROFILE. Needs hypothesis.

    ci        (default) the same examples every time, few enough for a change to wait for them
    dev       a handful, new ones every time
    nightly   many, new ones every time; failures are kept in Hypothesis's own database

The seed of whole runs (`dbo fuzz --seed`, pytest's `--dbo-seed`) is chosen apart from the profile.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from hypothesis import HealthCheck, settings

from dbo.errors import UsageError

VARIABLE = "HYPOTHESIS_PROFILE"
DEFAULT = "ci"


@dataclass(frozen=True, kw_only=True)
class Amount:
    """How much one profile draws.

    Attributes:
        clean: clean cases. planted: cases of each fault; planted_numeric: of each that breaks what only numbers show.
        numeric: planted cases with numbers, over all other faults.
        machine, machine_steps: runs of a state machine, and rules in each.
        new: other examples every time.
    """

    clean: int
    planted: int
    planted_numeric: int
    numeric: int
    machine: int
    machine_steps: int
    new: bool


PROFILES: Mapping[str, Amount] = MappingProxyType(
    {
        "dev": Amount(clean=20, planted=12, planted_numeric=11, numeric=20, machine=10, machine_steps=20, new=True),
        "ci": Amount(clean=100, planted=14, planted_numeric=11, numeric=20, machine=60, machine_steps=25, new=False),
        "nightly": Amount(
            clean=5000, planted=500, planted_numeric=500, numeric=200, machine=2000, machine_steps=60, new=True
        ),
    }
)


def chosen() -> str:
    """The name of the profile that the environment chooses.

    Raises:
        UsageError: no profile has this name.
    """
    name = os.environ.get(VARIABLE) or DEFAULT
    if name not in PROFILES:
        known = ", ".join(PROFILES)
        raise UsageError.of("a profile is one that exists", fix=f"use one of {known}", **{VARIABLE: name})
    return name


def amount() -> Amount:
    """How much the chosen profile draws."""
    return PROFILES[chosen()]


def load() -> None:
    """Register the profiles and load the chosen one."""
    for name, profile in PROFILES.items():
        settings.register_profile(
            name,
            deadline=None,  # a run's time says nothing about it, and machines differ
            derandomize=not profile.new,
            database=settings.get_profile("default").database if name == "nightly" else None,
            max_examples=profile.clean,
            print_blob=profile.new,
            suppress_health_check=[HealthCheck.too_slow],
        )
    settings.load_profile(chosen())
