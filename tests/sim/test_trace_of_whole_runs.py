"""Whole runs write what the contract of the trace says: every record of every kind, the engine's own kinds among them."""

import json

import pytest

from dbo.config import BACKENDS
from dbo.job.run import run
from dbo.job.types import CheckRequest
from dbo.trace import Trace, kinds
from gpu.check.setup import Quiet

ENGINE = {"config", "step.begin", "decide", "slices", "step.end", "join", "reserve", "use", "yield", "ubatch.exit"}
RUNS = [
    *({"all2all_backend": backend} for backend in BACKENDS),
    *({"all2all_backend": backend, "cudagraph_mode": "FULL"} for backend in BACKENDS),
    {"decode_context_parallel_size": 2, "dcp_comm_backend": "a2a_direct"},
]


def trace_of(folder, flags, inject=None):
    path = folder / "trace.json"
    run(CheckRequest(flags=flags, mode="ordering", trace=path, inject=inject), Quiet())
    return Trace.from_json(json.loads(path.read_text(encoding="utf-8"))["dbo"])


def wrong(trace):
    """A sentence for each kind of mistake in the records of a trace."""
    found = set()
    for record in trace.records:
        assert record.kind in kinds.KINDS
        found |= {f"{record.kind} {fault}" for fault in kinds.KINDS[record.kind].faults_of(record.attrs)}
    return sorted(found)


@pytest.mark.parametrize("flags", RUNS, ids=lambda flags: "-".join(map(str, flags.values())))
def test_records_carry_what_their_kinds_say(flags, tmp_path):
    trace = trace_of(tmp_path, flags)
    assert wrong(trace) == []
    assert {record.kind for record in trace.records} >= ENGINE


@pytest.mark.parametrize("fault", ["raise", "drop-hook", "drop-yield", "shared-buffer", "skip-coordination"])
def test_records_of_broken_runs_too(fault, tmp_path):
    assert wrong(trace_of(tmp_path, {}, inject=fault)) == []
