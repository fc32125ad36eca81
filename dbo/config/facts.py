"""Facts that configurations are checked against: backends, choices, and the shapes of a model and a device."""

from __future__ import annotations

from dataclasses import dataclass

LOW_LATENCY = "deepep_low_latency"
HIGH_THROUGHPUT = "deepep_high_throughput"
DEEPEP_V2 = "deepep_v2"
NCCL = "nccl"
SYMM_COPY = "symm_copy"

WORLDS = ("sim", "gpu")
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
DTYPES = tuple(DTYPE_BYTES)
CUDAGRAPH_MODES = ("NONE", "FULL")
DCP_COMM_BACKENDS = ("ag_rs", "a2a", "a2a_direct")
SHARED_EXPERTS = ("overlap", "before", "stream")

DEFAULT_DECODE_THRESHOLD_TOKENS = 32
DEFAULT_PREFILL_THRESHOLD_TOKENS = 512
DEFAULT_QUEUE_PAIR_DEPTH = 1024

# The largest values that options take; `dbo.config.options` gives the reason with each option.
MOST_RANKS = 4096
MOST_UBATCHES = 64
MOST_STEP_TOKENS = 2**20
MOST_BLOCK_TOKENS = 2**16
MOST_QUEUE_PAIR_DEPTH = 2**15
MOST_INT32 = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class BackendFacts:
    """What an all-to-all backend takes.

    Attributes:
        schedule: preset that fits the backend's exchange.
        default_comm_sms: SMs that it reserves under DBO unless told otherwise.
        takes_comm_sms: its kernels run on a settable number of SMs.
        hidden_sizes: the only hidden sizes that it has kernels for; None: any.
        dtypes: payloads that it carries; None: any.
        max_ubatches: how many ubatches may share its buffers; None: any number.
        dtype_fix: what a user does about a dtype that it does not carry.
    """

    schedule: str = "vllm_high_throughput"
    default_comm_sms: int = 0
    takes_comm_sms: bool = False
    hidden_sizes: frozenset[int] | None = None
    dtypes: frozenset[str] | None = None
    max_ubatches: int | None = None


_BF16 = frozenset({"bfloat16"})

BACKENDS: dict[str, BackendFacts] = {
    LOW_LATENCY: BackendFacts(
        schedule="mlp_shared_overlap",
        hidden_sizes=frozenset({2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192}),
        dtypes=_BF16,
        max_ubatches=2,
    ),
    HIGH_THROUGHPUT: BackendFacts(default_comm_sms=20, takes_comm_sms=True, dtypes=_BF16),
    DEEPEP_V2: BackendFacts(default_comm_sms=20, takes_comm_sms=True, dtypes=_BF16),
    NCCL: BackendFacts(),
    SYMM_COPY: BackendFacts(),
}


def backend_names() -> tuple[str, ...]:
    """The all-to-all backends that a configuration may name."""
    return tuple(BACKENDS)


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The few numbers of a model that a configuration depends on.

    Attributes:
        hidden_size: H, elements of a token's hidden state.
        num_experts: routed experts of a layer, over all ranks.
        num_heads: query heads.
        max_position_embeddings: longest sequence that the model was made for; None: not limited.
        scoring_func: how the gate scores experts; only "softmax" is built.
        quantization: name of the checkpoint's weight quantization; only None is built.
    """

    hidden_size: int
    num_experts: int
    num_heads: int
    max_position_embeddings: int | None = None
    scoring_func: str = "softmax"
    quantization: str | None = None


@dataclass(frozen=True, kw_only=True)
class DeviceLimits:
    """What one device, and the machine around it, offers. The defaults are an H200's, which the simulator models.

    Attributes:
        num_sms: streaming multiprocessors of a device.
        num_devices: devices visible on this machine; matters in world `gpu` only.
        memory_bytes: memory of a device.
    """

    num_sms: int = 132
    num_devices: int = 0
    memory_bytes: int = 139 * 2**30


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What the requests of a run will ask for, where that is known: prompt tokens, and tokens to generate."""

    prefill_tokens: int
    decode_tokens: int
