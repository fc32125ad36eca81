"""Processes of a run: `process` is one rank's, `torchrun` takes ranks that exist, `transport` and `merge` bring traces home."""
