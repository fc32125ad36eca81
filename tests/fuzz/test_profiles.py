"""Profiles are chosen by HYPOTHESIS_PROFILE."""

import pytest
from hypothesis import settings

from dbo.errors import UsageError
from fuzz import profiles


@pytest.mark.parametrize("name", profiles.PROFILES)
def test_a_profile_is_chosen_by_the_environment(name, monkeypatch):
    before = settings.get_current_profile_name() if hasattr(settings, "get_current_profile_name") else "ci"
    monkeypatch.setenv(profiles.VARIABLE, name)
    try:
        profiles.load()
        assert settings.default.max_examples == profiles.amount().clean
        assert settings.default.derandomize is (name == "ci")
        assert profiles.amount().planted >= 10 and profiles.amount().numeric >= 20
    finally:
        settings.load_profile(before)


def test_ci_is_the_default_and_unknown_names_are_refused(monkeypatch):
    monkeypatch.delenv(profiles.VARIABLE, raising=False)
    assert profiles.chosen() == "ci"
    monkeypatch.setenv(profiles.VARIABLE, "fast")
    with pytest.raises(UsageError, match="HYPOTHESIS_PROFILE=fast; use one of dev, ci, nightly"):
        profiles.load()
