"""Loads the Hypothesis profile and gives the seed of whole runs. Needs hypothesis."""

from __future__ import annotations

import pytest

from fuzz import profiles

profiles.load()


@pytest.fixture
def fuzz_seed(request: pytest.FixtureRequest, record_property) -> int:
    """The seed that the pytest plugin printed in the header (`--dbo-seed`); 0 where the plugin is off."""
    session = request.config.pluginmanager.get_plugin("dbo-session")
    seed = session.seed if session is not None else 0
    record_property("fuzz-seed", seed)
    print(f"seed={seed} profile={profiles.chosen()}")
    return seed
