"""The trace of one rank on devices."""
