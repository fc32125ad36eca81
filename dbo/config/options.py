"""`DBOConfig`: everything a run can be told, with vLLM's names. Values only; what they may be is in `rules`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dbo.config import capacity, facts
from dbo.errors import ConfigError

_DERIVE: Any = None
"""Default of a field whose value follows from the others; it is never seen after construction."""

DBO_ONLY_FIELDS = (
    "num_ubatches",
    "dbo_decode_token_threshold",
    "dbo_prefill_token_threshold",
    "dbo_comm_sms",
    "dbo_schedule",
    "split_points",
)


@dataclass(frozen=True, kw_only=True)
class DBOConfig:
    """The options of one run, equal on all ranks. Construction derives defaults; `dbo.config.rules` refuses what
    cannot work.

    Fields given as None take a value that follows from the others. Use `replace` of this class, not of `dataclasses`:
    it derives anew what the caller never chose.

    Attributes:
        world: where the program runs, "sim" or "gpu".
        data_parallel_size: DP replicas, each with requests of its own.
        enable_expert_parallel: routed experts are spread over all ranks.
        enable_dbo: split steps and overlap their exchanges; implied by `num_ubatches` >= 2.
        num_ubatches: U; 2 once DBO is on, else 1.
        dbo_decode_token_threshold: tokens from which a uniform decode batch votes for a split.
        dbo_prefill_token_threshold: the same for a batch with a prefill in it.
        split_points: the U - 1 token counts where a step is cut; None: equal parts of the padded step.
        dbo_comm_sms: SMs reserved for exchanges; even, 0 where the backend takes none.
        dbo_schedule: a preset's name, a file, or the text of a schedule; not parsed here.
        shared_experts: the shared expert overlaps its own combine, runs before, or on a side stream.
        all2all_backend: who moves tokens between ranks.
        low_latency_max_tokens_per_rank: rows a rank may send in one low-latency call; sizes its buffers.
        queue_pair_depth: work requests that a queue pair holds; bounds the above.
        cudagraph_mode: "NONE" or "FULL".
        capture_sizes: token counts to capture; None: `capacity.capture_ladder` up to the largest decode batch.
        decode_context_parallel_size: C, ranks that share the KV cache of their requests.
        cp_kv_cache_interleave_size: consecutive positions that stay on one of them.
        dcp_comm_backend: how their partial outputs meet; None with C = 1, else "ag_rs" unless given.
        max_num_batched_tokens: most tokens of one step of a rank.
        max_num_seqs: most requests of one step of a rank.
        max_model_len: longest sequence, prompt and output, in tokens.
        block_size: tokens of a KV block.
        num_kv_blocks: blocks of a rank's cache, the reserved null block included.
        dtype: of activations and weights.
        seed: of everything random.
        explicit: names of the derived fields that the caller chose.
    """

    world: str = "sim"
    data_parallel_size: int = 1
    enable_expert_parallel: bool = False
    enable_dbo: bool = False
    num_ubatches: int = _DERIVE
    dbo_decode_token_threshold: int = _DERIVE
    dbo_prefill_token_threshold: int = _DERIVE
    split_points: tuple[int, ...] | None = None
    dbo_comm_sms: int = _DERIVE
    dbo_schedule: str = _DERIVE
    shared_experts: str = "overlap"
    all2all_backend: str = facts.NCCL
    low_latency_max_tokens_per_rank: int = _DERIVE
    queue_pair_depth: int = _DERIVE
    cudagraph_mode: str = "NONE"
    capture_sizes: tuple[int, ...] | None = None
    decode_context_parallel_size: int = 1
    cp_kv_cache_interleave_size: int = 1
    dcp_comm_backend: str | None = None
    max_num_batched_tokens: int = _DERIVE
    max_num_seqs: int = _DERIVE
    max_model_len: int = 4096
    block_size: int = 16
    num_kv_blocks: int = 1024
    dtype: str = "bfloat16"
    seed: int = 0
    explicit: frozenset[str] = field(init=False, repr=False, compare=False, default=frozenset())

    def __post_init__(self) -> None:
        self._require_integers()
        derive = self._derivations()
        self._set("explicit", frozenset(name for name in derive if getattr(self, name) is not None))
        for name, value_of in derive.items():
            if name not in self.explicit:
                self._set(name, value_of())
        self._set("enable_dbo", self._splits)
        for name in ("split_points", "capture_sizes"):
            if getattr(self, name) is not None:
                self._set(name, tuple(getattr(self, name)))

    def _derivations(self) -> dict[str, Callable[[], Any]]:
        """The derived fields, in the order in which they depend on each other."""
        return {
            "num_ubatches": lambda: 2 if self.enable_dbo else 1,
            "dbo_decode_token_threshold": lambda: facts.DEFAULT_DECODE_THRESHOLD_TOKENS,
            "dbo_prefill_token_threshold": lambda: facts.DEFAULT_PREFILL_THRESHOLD_TOKENS,
            "dbo_comm_sms": lambda: self._backend.default_comm_sms if self._splits else 0,
            "dbo_schedule": lambda: self._backend.schedule,
            "dcp_comm_backend": lambda: "ag_rs" if self.decode_context_parallel_size > 1 else None,
            "queue_pair_depth": lambda: facts.DEFAULT_QUEUE_PAIR_DEPTH,
            "low_latency_max_tokens_per_rank": lambda: capacity.queue_pair_max_tokens(self.queue_pair_depth),
            "max_num_batched_tokens": self._default_max_num_batched_tokens,
            "max_num_seqs": lambda: min(128, self.max_num_batched_tokens),
        }

    @property
    def num_ranks(self) -> int:
        """Ranks of the run: DP replicas times the ranks of a DCP group. The experts are spread over all of them."""
        return self.data_parallel_size * self.decode_context_parallel_size

    @property
    def cudagraph_capture_sizes(self) -> tuple[int, ...]:
        """Token counts that have a graph, ascending; empty without graphs."""
        if self.cudagraph_mode != "FULL":
            return ()
        return self.capture_sizes or capacity.capture_ladder(self.max_num_seqs)

    @property
    def max_dispatch_tokens_per_rank(self) -> int:
        """Most rows that a rank dispatches in one call, in an unsplit step; a DCP group shares its rows out."""
        return -(-self.max_num_batched_tokens // self.decode_context_parallel_size)

    def replace(self, **changes: Any) -> DBOConfig:
        """A configuration with some options changed; what the caller never chose is derived anew."""
        derived = self._derivations().keys()
        kept = {
            f.name: getattr(self, f.name)
            for f in dataclasses.fields(self)
            if f.init and (f.name in self.explicit or f.name not in derived)
        }
        return DBOConfig(**(kept | changes))

    def without_dbo(self) -> DBOConfig:
        """The same run, never split: the baseline to compare with."""
        return self.replace(enable_dbo=False, **dict.fromkeys(DBO_ONLY_FIELDS))

    @property
    def _splits(self) -> bool:
        return self.enable_dbo or (self.num_ubatches is not None and self.num_ubatches >= 2)

    @property
    def _backend(self) -> facts.BackendFacts:
        return facts.BACKENDS.get(self.all2all_backend, facts.BackendFacts())

    def _default_max_num_batched_tokens(self) -> int:
        if self.all2all_backend == facts.LOW_LATENCY:
            return self.low_latency_max_tokens_per_rank * self.decode_context_parallel_size
        return 2048

    def _require_integers(self) -> None:
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if f.type == "int" and value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                raise ConfigError.of(f"{f.name} is an integer", fix="give a whole number", **{f.name: repr(value)})

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
