"""Each option by itself: its choices, its least value. The rules about several options rely on these."""

from __future__ import annotations

from collections.abc import Iterator

from dbo.config import facts
from dbo.config.case import ConfigUnderTest
from dbo.errors import refusal

_AT_LEAST = {
    "data_parallel_size": 1,
    "num_ubatches": 1,
    "dbo_comm_sms": 0,
    "low_latency_max_tokens_per_rank": 1,
    "queue_pair_depth": 4,
    "decode_context_parallel_size": 1,
    "cp_kv_cache_interleave_size": 1,
    "max_num_batched_tokens": 1,
    "max_num_seqs": 1,
    "max_model_len": 1,
    "block_size": 1,
    "num_kv_blocks": 2,
    "dbo_decode_token_threshold": 0,
    "dbo_prefill_token_threshold": 0,
    "seed": 0,
}
_CHOICES = {
    "world": facts.WORLDS,
    "all2all_backend": tuple(facts.BACKENDS),
    "cudagraph_mode": facts.CUDAGRAPH_MODES,
    "shared_experts": facts.SHARED_EXPERTS,
    "dtype": facts.DTYPES,
    "dcp_comm_backend": (None, *facts.DCP_COMM_BACKENDS),
}


def values(case: ConfigUnderTest) -> Iterator[str]:
    """Each option by itself: its type, its choices, its least value."""
    for name, choices in _CHOICES.items():
        value = getattr(case.config, name)
        if value not in choices:
            listed = ", ".join(c for c in choices if c is not None)
            yield refusal(f"{name} is one of {listed}", "choose one of these", **{name: value})
    for name, least in _AT_LEAST.items():
        value = getattr(case.config, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            yield refusal(f"{name} is an integer of at least {least}", f"raise it to {least}", **{name: value})
    for name in ("split_points", "capture_sizes"):
        sizes = getattr(case.config, name)
        if sizes is not None and not _increasing(sizes):
            yield refusal(f"{name} are increasing integers above 0", "sort them and drop repetitions", **{name: sizes})


def _increasing(sizes: tuple[int, ...]) -> bool:
    whole = all(isinstance(s, int) and not isinstance(s, bool) for s in sizes)
    return whole and all(a < b for a, b in zip((0, *sizes), sizes, strict=False))
