"""What `dbo check` runs when it is told nothing, and where its help says that a default follows from another option."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dbo.config import BACKENDS
from dbo.config.facts import BackendFacts
from dbo.job.types import CheckRequest

# Two DP replicas, small steps, thresholds that some steps reach.
DEFAULTS: dict[str, Any] = {
    "data_parallel_size": 2,
    "enable_expert_parallel": True,
    "enable_dbo": True,
    "all2all_backend": "deepep_low_latency",
    "dbo_decode_token_threshold": 4,
    "dbo_prefill_token_threshold": 24,
    "max_num_batched_tokens": 48,
    "max_num_seqs": 8,
    "max_model_len": 512,
    "block_size": 16,
    "num_kv_blocks": 64,
    "dtype": "float32",
}

SOURCES: Mapping[str, str] = {
    "low_latency_max_tokens_per_rank": "as --max-num-batched-tokens",
    "dtype": "on devices what the backend carries",
    "num_ubatches": "1 without DBO",
}
"""Where a default comes from, in words, where it is not as `DBOConfig` declares it."""


def flags_of(request: CheckRequest) -> dict[str, Any]:
    """The fields of `DBOConfig` that the job gives: the user's, and its own defaults for the rest."""
    flags = DEFAULTS | dict(request.flags)
    flags["world"] = request.world
    if "seed" not in request.flags:
        flags["seed"] = request.seed
    if flags["all2all_backend"] == "deepep_low_latency":
        # Room for one unsplit step, not for what queue pairs allow: the buffers are computed over in full.
        flags.setdefault("low_latency_max_tokens_per_rank", flags["max_num_batched_tokens"])
    carries = BACKENDS.get(flags["all2all_backend"], BackendFacts()).dtypes
    if request.world == "gpu" and request.device != "cpu" and carries and "dtype" not in request.flags:
        flags["dtype"] = min(carries)  # the simulator and gloo carry any, a library's kernels do not
    if not flags["enable_dbo"] and flags.get("num_ubatches", 1) < 2:
        for name in ("dbo_decode_token_threshold", "dbo_prefill_token_threshold"):
            if name not in request.flags:
                flags.pop(name, None)
    return flags
