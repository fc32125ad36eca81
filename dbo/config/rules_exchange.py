"""What exchanges between ranks ask for: SMs, buffers, payloads, an even spread of experts and heads."""

from __future__ import annotations

from collections.abc import Iterator

from dbo.config import capacity, facts
from dbo.config.case import ConfigUnderTest
from dbo.config.facts import BACKENDS
from dbo.errors import refusal


def experts(case: ConfigUnderTest) -> Iterator[str]:
    config, model = case.config, case.model
    if config.enable_expert_parallel and model.num_experts % config.num_ranks:
        yield refusal(
            "the routed experts are spread evenly over the ranks",
            "choose a number of ranks that divides them",
            num_experts=model.num_experts,
            num_ranks=config.num_ranks,
        )


def comm_sms(case: ConfigUnderTest) -> Iterator[str]:
    config, sms = case.config, case.config.dbo_comm_sms
    backend = BACKENDS[config.all2all_backend]
    if sms % 2:
        yield refusal("dbo_comm_sms is even", f"use {sms - 1} or {sms + 1}", dbo_comm_sms=sms)
    if sms >= case.device.num_sms:
        yield refusal(
            "dbo_comm_sms leaves SMs for the model",
            f"stay below {case.device.num_sms}",
            dbo_comm_sms=sms,
            num_sms=case.device.num_sms,
        )
    if sms and not backend.takes_comm_sms:
        takers = ", ".join(name for name, b in BACKENDS.items() if b.takes_comm_sms)
        yield refusal(
            f"{config.all2all_backend} takes no SM count",
            f"drop --dbo-comm-sms or use one of {takers}",
            dbo_comm_sms=sms,
        )


def options_of_low_latency(case: ConfigUnderTest) -> Iterator[str]:
    config = case.config
    if config.all2all_backend == facts.LOW_LATENCY:
        return
    for name in ("low_latency_max_tokens_per_rank", "queue_pair_depth"):
        if name in config.explicit:
            yield refusal(
                f"{name} is about the low-latency buffers only",
                f"drop it or use --all2all-backend {facts.LOW_LATENCY}",
                **{name: getattr(config, name)},
                all2all_backend=config.all2all_backend,
            )


def low_latency(case: ConfigUnderTest) -> Iterator[str]:
    config = case.config
    if config.all2all_backend != facts.LOW_LATENCY:
        return
    most = config.low_latency_max_tokens_per_rank
    pairs = capacity.queue_pair_max_tokens(config.queue_pair_depth)
    if config.max_dispatch_tokens_per_rank > most:
        yield refusal(
            "an unsplit step fits in one low-latency call of each rank",
            f"lower --max-num-batched-tokens to {most * config.decode_context_parallel_size} "
            "or raise --low-latency-max-tokens-per-rank",
            max_num_batched_tokens=config.max_num_batched_tokens,
            low_latency_max_tokens_per_rank=most,
        )
    if most > pairs:
        yield refusal(
            "a low-latency call needs two work requests a token: at most queue_pair_depth / 2 - 1 tokens",
            f"lower it to {pairs} or raise --queue-pair-depth to {2 * (most + 1)}",
            low_latency_max_tokens_per_rank=most,
            queue_pair_depth=config.queue_pair_depth,
        )
    needed = capacity.low_latency_size_hint_bytes(
        max_tokens_per_rank=most,
        hidden_size=case.model.hidden_size,
        num_ranks=config.num_ranks,
        num_experts=case.model.num_experts,
    )
    if needed > case.device.memory_bytes:
        yield refusal(
            "the low-latency buffer, by the library's own size hint, fits in a device",
            "lower --low-latency-max-tokens-per-rank",
            low_latency_buffer_bytes=needed,
            memory_bytes=case.device.memory_bytes,
            low_latency_max_tokens_per_rank=most,
        )


def payload(case: ConfigUnderTest) -> Iterator[str]:
    backend = BACKENDS[case.config.all2all_backend]
    hidden_size, dtype = case.model.hidden_size, case.config.dtype
    if (
        backend.hidden_sizes is not None
        and hidden_size not in backend.hidden_sizes
        and "any_hidden_size" not in case.capabilities
    ):
        yield refusal(
            f"{case.config.all2all_backend} has kernels for the hidden sizes "
            + ", ".join(map(str, sorted(backend.hidden_sizes))),
            "use a model of one of these or another --all2all-backend",
            hidden_size=hidden_size,
        )
    if backend.dtypes is not None and dtype not in backend.dtypes and "any_dtype" not in case.capabilities:
        yield refusal(
            f"{case.config.all2all_backend} carries " + ", ".join(sorted(backend.dtypes)),
            "pass --dtype bfloat16, or --all2all-backend nccl, which carries any",
            dtype=dtype,
        )


def decode_context_parallel(case: ConfigUnderTest) -> Iterator[str]:
    config = case.config
    size, interleave = config.decode_context_parallel_size, config.cp_kv_cache_interleave_size
    if size == 1:
        if config.dcp_comm_backend is not None:
            yield refusal(
                "dcp_comm_backend means something only with decode context parallelism",
                "drop --dcp-comm-backend or set --decode-context-parallel-size 2 or more",
                dcp_comm_backend=config.dcp_comm_backend,
                decode_context_parallel_size=1,
            )
        if interleave != 1:
            yield refusal(
                "cp_kv_cache_interleave_size means something only with decode context parallelism",
                "drop it or set --decode-context-parallel-size 2 or more",
                cp_kv_cache_interleave_size=interleave,
                decode_context_parallel_size=1,
            )
        return
    if case.model.num_heads % size:
        yield refusal(
            "the query heads divide by the DCP size",
            "choose a size that divides them",
            num_heads=case.model.num_heads,
            decode_context_parallel_size=size,
        )
    if config.block_size % interleave:
        yield refusal(
            "a KV block holds whole interleave runs",
            "choose an interleave size that divides the block size",
            cp_kv_cache_interleave_size=interleave,
            block_size=config.block_size,
        )
