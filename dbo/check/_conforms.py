"""Every detector keeps the detectors' contract: mypy holds each module against it here. Nothing runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dbo.check import (
        buffer_reuse,
        capacity,
        collective_mismatch,
        config,
        deadlock,
        dp_disagreement,
        empty_ubatch,
        graph_capture,
        graph_stale,
        hook_late,
        hook_lost,
        hook_twice,
        metadata_slice,
        no_overlap,
        numeric,
        padding_leak,
        slot_cycle,
        stream_race,
        swallowed_error,
        two_awake,
        unequal_yields,
    )
    from dbo.check.violation import Detector

    detectors: list[Detector] = [
        buffer_reuse,
        capacity,
        collective_mismatch,
        config,
        deadlock,
        dp_disagreement,
        empty_ubatch,
        graph_capture,
        graph_stale,
        hook_late,
        hook_lost,
        hook_twice,
        metadata_slice,
        no_overlap,
        numeric,
        padding_leak,
        slot_cycle,
        stream_race,
        swallowed_error,
        two_awake,
        unequal_yields,
    ]
