"""`DBOConfig`: everything a run can be told, with vLLM's names. Values only; what they may be is in `rules`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dbo.config import capacity, facts
from dbo.config.declaration import option
from dbo.errors import ConfigError

_DERIVE: Any = None
"""Default of a field whose value follows from the others; it is never seen after construction."""

_RANKS = "runs of more ranks than this were never tried"
_STEP = "the metadata of a step is built row by row on the host"
_INT32 = "token counts are int32"

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

    world: str = option("sim", flag="--world", help="where to run", choices=lambda: facts.WORLDS)
    data_parallel_size: int = option(
        1, flag="--data-parallel-size", help="DP replicas", least=1, most=facts.MOST_RANKS, why=_RANKS
    )
    enable_expert_parallel: bool = option(
        False, flag="--enable-expert-parallel", help="spread the routed experts over all ranks"
    )
    enable_dbo: bool = option(False, flag="--enable-dbo", help="split steps and overlap their exchanges")
    num_ubatches: int = option(
        _DERIVE,
        flag="--ubatch-size",
        help="number of ubatches a step is cut in; 2 or more also enables DBO",
        default="1 without DBO",
        least=1,
        most=facts.MOST_UBATCHES,
        why="each is a host task of every rank",
    )
    dbo_decode_token_threshold: int = option(
        _DERIVE,
        flag="--dbo-decode-token-threshold",
        help="tokens from which a uniform decode batch is split",
        least=0,
        most=facts.MOST_INT32,
        why=_INT32,
    )
    dbo_prefill_token_threshold: int = option(
        _DERIVE,
        flag="--dbo-prefill-token-threshold",
        help="tokens from which a batch with a prefill is split",
        least=0,
        most=facts.MOST_INT32,
        why=_INT32,
    )
    split_points: tuple[int, ...] | None = option(
        None,
        flag="--dbo-split-points",
        help="token counts where a step is cut, comma-separated",
        default="equal parts",
        most=facts.MOST_STEP_TOKENS,
        why=_STEP,
    )
    dbo_comm_sms: int = option(
        _DERIVE,
        flag="--dbo-comm-sms",
        help="SMs reserved for exchanges under DBO, even",
        default="what the backend reserves",
        least=0,
        most=facts.MOST_INT32,
        why=_INT32,
    )
    dbo_schedule: str = option(
        _DERIVE, flag="--dbo-schedule", help="preset name or schedule file", default="the backend's own"
    )
    shared_experts: str = option(
        "overlap",
        flag="--shared-experts",
        help="the shared expert overlaps its combine, runs before, or on a side stream",
        choices=lambda: facts.SHARED_EXPERTS,
    )
    all2all_backend: str = option(
        facts.NCCL, flag="--all2all-backend", help="who moves tokens between ranks", choices=facts.backend_names
    )
    low_latency_max_tokens_per_rank: int = option(
        _DERIVE,
        flag="--low-latency-max-tokens-per-rank",
        help="rows a rank may send in one low-latency call",
        default="what the queue pairs allow",
        least=1,
        most=capacity.queue_pair_max_tokens(facts.MOST_QUEUE_PAIR_DEPTH),
        why="the deepest queue pair allows no more",
        unit="tokens",
    )
    queue_pair_depth: int = option(
        _DERIVE,
        flag="--queue-pair-depth",
        help="work requests a queue pair holds",
        least=4,
        most=facts.MOST_QUEUE_PAIR_DEPTH,
        why="network cards take no deeper queue",
    )
    cudagraph_mode: str = option(
        "NONE",
        flag="--cudagraph-mode",
        help="replay full CUDA graphs of uniform decode steps, or none",
        choices=lambda: facts.CUDAGRAPH_MODES,
    )
    capture_sizes: tuple[int, ...] | None = option(
        None,
        flag="--cudagraph-capture-sizes",
        help="token counts to capture, comma-separated",
        default="a ladder up to --max-num-seqs",
        most=facts.MOST_STEP_TOKENS,
        why=_STEP,
    )
    decode_context_parallel_size: int = option(
        1,
        flag="--decode-context-parallel-size",
        help="ranks that share the KV cache of their requests",
        least=1,
        most=facts.MOST_RANKS,
        why=_RANKS,
    )
    cp_kv_cache_interleave_size: int = option(
        1,
        flag="--cp-kv-cache-interleave-size",
        help="consecutive positions that stay on one of these ranks",
        least=1,
        most=facts.MOST_BLOCK_TOKENS,
        why="a run lies in one KV block",
    )
    dcp_comm_backend: str | None = option(
        None,
        flag="--dcp-comm-backend",
        help="how their partial outputs meet",
        default="ag_rs with two such ranks or more",
        choices=lambda: facts.DCP_COMM_BACKENDS,
    )
    max_num_batched_tokens: int = option(
        _DERIVE,
        flag="--max-num-batched-tokens",
        help="most tokens of one step of a rank",
        least=1,
        most=facts.MOST_STEP_TOKENS,
        why=_STEP,
    )
    max_num_seqs: int = option(
        _DERIVE,
        flag="--max-num-seqs",
        help="most requests of one step of a rank",
        least=1,
        most=facts.MOST_STEP_TOKENS,
        why=_STEP,
    )
    max_model_len: int = option(
        4096,
        flag="--max-model-len",
        help="longest sequence, in tokens",
        least=1,
        most=facts.MOST_INT32,
        why="positions are int32",
        unit="tokens",
    )
    block_size: int = option(
        16,
        flag="--block-size",
        help="tokens of a KV block",
        least=1,
        most=facts.MOST_BLOCK_TOKENS,
        why="larger ones waste most of their cache",
    )
    num_kv_blocks: int = option(
        1024,
        flag="--num-kv-blocks",
        help="KV blocks of a rank, the reserved null block included",
        least=2,
        most=facts.MOST_INT32,
        why="block ids are int32",
    )
    dtype: str = option("bfloat16", flag="--dtype", help="of activations and weights", choices=lambda: facts.DTYPES)
    seed: int = option(
        0, flag="--seed", help="of everything random", least=0, most=2**63 - 1, why="generators take 63 bits"
    )
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
