"""The command line's view of `DBOConfig`: each option described once, and the ones that are refused by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dbo.config import facts
from dbo.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Flag:
    """One command-line option.

    Attributes:
        flag: its spelling.
        field: of `DBOConfig`.
        type: turns the text into a value; None for a switch that stores True.
        choices: the texts that are taken; None: any.
        help: one line.
        unit: what its value counts, where the flag's last word does not say it.
    """

    flag: str
    field: str
    type: Callable[[str], Any] | None
    choices: tuple[str, ...] | None = None
    help: str
    unit: str = ""

    @property
    def metavar(self) -> str:
        """What a help text calls the value."""
        return (self.unit or self.flag.rpartition("-")[2]).upper()


@dataclass(frozen=True, kw_only=True)
class NotNow:
    """An option of other engines that this project does not have yet, refused when it asks for something.

    Attributes:
        flag, field: its spelling on a command line and in a configuration file.
        neutral: values that ask for nothing.
        what: what it would ask for.
        instead: what to do.
    """

    flag: str
    field: str
    neutral: tuple[Any, ...] = (None, False)
    what: str
    instead: str = "drop the option"


def comma_separated_ints(text: str) -> tuple[int, ...]:
    """Parse "16,64,128".

    Raises:
        ValueError: anything but integers between commas.
    """
    return tuple(int(part) for part in text.split(","))


FLAGS: tuple[Flag, ...] = (
    Flag(flag="--world", field="world", type=str, choices=facts.WORLDS, help="where to run"),
    Flag(flag="--data-parallel-size", field="data_parallel_size", type=int, help="DP replicas"),
    Flag(
        flag="--enable-expert-parallel",
        field="enable_expert_parallel",
        type=None,
        help="spread the routed experts over all ranks",
    ),
    Flag(flag="--enable-dbo", field="enable_dbo", type=None, help="split steps and overlap their exchanges"),
    Flag(
        flag="--ubatch-size",
        field="num_ubatches",
        type=int,
        help="number of ubatches a step is cut in; 2 or more also enables DBO (default: 2 with DBO)",
    ),
    Flag(
        flag="--dbo-decode-token-threshold",
        field="dbo_decode_token_threshold",
        type=int,
        help="tokens from which a uniform decode batch is split (default: 32)",
    ),
    Flag(
        flag="--dbo-prefill-token-threshold",
        field="dbo_prefill_token_threshold",
        type=int,
        help="tokens from which a batch with a prefill is split (default: 512)",
    ),
    Flag(
        flag="--dbo-split-points",
        field="split_points",
        type=comma_separated_ints,
        help="token counts where a step is cut, comma-separated (default: equal parts)",
    ),
    Flag(flag="--dbo-comm-sms", field="dbo_comm_sms", type=int, help="SMs reserved for exchanges under DBO, even"),
    Flag(flag="--dbo-schedule", field="dbo_schedule", type=str, help="preset name or schedule file"),
    Flag(
        flag="--shared-experts",
        field="shared_experts",
        type=str,
        choices=facts.SHARED_EXPERTS,
        help="the shared expert overlaps its combine, runs before, or on a side stream",
    ),
    Flag(
        flag="--all2all-backend",
        field="all2all_backend",
        type=str,
        choices=tuple(facts.BACKENDS),
        help="who moves tokens between ranks",
    ),
    Flag(
        flag="--low-latency-max-tokens-per-rank",
        field="low_latency_max_tokens_per_rank",
        type=int,
        help="rows a rank may send in one low-latency call (default: what the queue pairs allow)",
        unit="tokens",
    ),
    Flag(
        flag="--queue-pair-depth",
        field="queue_pair_depth",
        type=int,
        help="work requests a queue pair holds (default: 1024)",
    ),
    Flag(
        flag="--cudagraph-mode",
        field="cudagraph_mode",
        type=str,
        choices=facts.CUDAGRAPH_MODES,
        help="replay full CUDA graphs of uniform decode steps, or none",
    ),
    Flag(
        flag="--cudagraph-capture-sizes",
        field="capture_sizes",
        type=comma_separated_ints,
        help="token counts to capture, comma-separated (default: a ladder up to --max-num-seqs)",
    ),
    Flag(
        flag="--decode-context-parallel-size",
        field="decode_context_parallel_size",
        type=int,
        help="ranks that share the KV cache of their requests",
    ),
    Flag(
        flag="--cp-kv-cache-interleave-size",
        field="cp_kv_cache_interleave_size",
        type=int,
        help="consecutive positions that stay on one of these ranks",
    ),
    Flag(
        flag="--dcp-comm-backend",
        field="dcp_comm_backend",
        type=str,
        choices=facts.DCP_COMM_BACKENDS,
        help="how their partial outputs meet",
    ),
    Flag(
        flag="--max-num-batched-tokens",
        field="max_num_batched_tokens",
        type=int,
        help="most tokens of one step of a rank",
    ),
    Flag(flag="--max-num-seqs", field="max_num_seqs", type=int, help="most requests of one step of a rank"),
    Flag(flag="--max-model-len", field="max_model_len", type=int, help="longest sequence, in tokens", unit="tokens"),
    Flag(flag="--block-size", field="block_size", type=int, help="tokens of a KV block"),
    Flag(
        flag="--num-kv-blocks",
        field="num_kv_blocks",
        type=int,
        help="KV blocks of a rank, the reserved null block included",
    ),
    Flag(flag="--dtype", field="dtype", type=str, choices=facts.DTYPES, help="of activations and weights"),
    Flag(flag="--seed", field="seed", type=int, help="of everything random"),
)

NOT_NOW: tuple[NotNow, ...] = (
    NotNow(flag="--kv-cache-dtype", field="kv_cache_dtype", neutral=(None, "auto"), what="a quantized KV cache"),
    NotNow(flag="--quantization", field="quantization", what="quantized weights"),
    NotNow(flag="--fp8-dispatch", field="fp8_dispatch", what="fp8 dispatch", instead="payloads are sent as they are"),
    NotNow(flag="--enable-eplb", field="enable_eplb", what="expert load balancing"),
    NotNow(
        flag="--num-redundant-experts",
        field="num_redundant_experts",
        neutral=(None, 0),
        what="redundant experts",
    ),
    NotNow(
        flag="--tensor-parallel-size",
        field="tensor_parallel_size",
        neutral=(None, 1),
        what="tensor parallelism",
        instead="use --data-parallel-size or --decode-context-parallel-size",
    ),
    NotNow(
        flag="--pipeline-parallel-size",
        field="pipeline_parallel_size",
        neutral=(None, 1),
        what="pipeline parallelism",
        instead="use --data-parallel-size",
    ),
    NotNow(flag="--speculative-config", field="speculative_config", what="drafters"),
    NotNow(flag="--enable-lora", field="enable_lora", what="LoRA"),
    NotNow(flag="--limit-mm-per-prompt", field="limit_mm_per_prompt", what="multimodal input"),
    NotNow(flag="--port", field="port", what="HTTP serving", instead="pass prompts on the command line or from Python"),
    NotNow(flag="--gsm8k", field="gsm8k", what="the GSM8K evaluation", instead="token equality with DBO off stands in"),
)


def refuse_not_now(options: Mapping[str, Any]) -> None:
    """Refuse, by name, options that ask for what is not built; neutral values and other names pass.

    Args:
        options: values by field name or by flag.

    Raises:
        ConfigError: the first such option.
    """
    for entry in NOT_NOW:
        for name in (entry.field, entry.flag):
            if name in options and options[name] not in entry.neutral:
                raise ConfigError.of(f"{entry.what}: not now", fix=entry.instead, **{name: options[name]})
