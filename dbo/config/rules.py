"""Every refusal and warning of a configuration, each one sentence: the rule, ``name=value``, the fix.

A rule is a generator that yields the sentences it objects with, so that a configuration can be refused with the first
or explained with all. Rules are independent of each other; all rely on `rules_values`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from dbo.config import facts, rules_exchange, rules_sizes, rules_ubatching, rules_values
from dbo.config.case import ConfigUnderTest, Rule
from dbo.config.facts import DeviceLimits, ModelShape, Workload
from dbo.config.options import DBOConfig
from dbo.config.support import require_implemented
from dbo.errors import ConfigError, NotAvailable, refusal

MOSTLY = 0.75
"""Share of a workload's tokens from which it counts as mostly prefill or mostly decode."""

RULES: tuple[Rule, ...] = (
    rules_ubatching.dbo_needs_expert_parallelism,
    rules_ubatching.ubatch_count,
    rules_ubatching.options_of_dbo,
    rules_ubatching.thresholds,
    rules_ubatching.split_points,
    rules_exchange.comm_sms,
    rules_exchange.experts,
    rules_exchange.options_of_low_latency,
    rules_exchange.low_latency,
    rules_exchange.payload,
    rules_exchange.decode_context_parallel,
    rules_sizes.batch_sizes,
    rules_sizes.captured_sizes,
    rules_sizes.model_family,
    rules_sizes.visible_devices,
)


def validate(
    config: DBOConfig,
    model: ModelShape,
    device: DeviceLimits | None = None,
    capabilities: Collection[str] = (),
    *,
    workload: Workload | None = None,
) -> list[str]:
    """Refuse a configuration that cannot work, before anything is built.

    Args:
        device: None: the simulator's, an H200.
        capabilities: what a world can do beyond its backends' limits: "any_hidden_size" lifts the low-latency hidden
            sizes (used in tests only), "any_dtype" the payload types (the simulator carries any).
        workload: what the requests will ask for, where it is known; used for a warning only.

    Returns:
        Warnings, one sentence each: the run works, and something else would serve better.

    Raises:
        ConfigError: the first rule that is broken.
        NotAvailable: the configuration is right, and this build or this machine cannot run it.
    """
    case = ConfigUnderTest(
        config=config, model=model, device=device or DeviceLimits(), capabilities=frozenset(capabilities)
    )
    for sentence in refusals(case):
        raise ConfigError(sentence)
    if config.world == "gpu" and case.device.num_devices == 0:
        raise NotAvailable.of("world gpu needs one visible device a rank", fix="use --world sim", num_devices=0)
    require_implemented(config)
    return list(_warnings(config, workload))


def refusals(case: ConfigUnderTest) -> Iterator[str]:
    """All sentences that object, in order. Values of the wrong type or outside the choices end the list at once."""
    basic = list(rules_values.values(case))
    yield from basic
    if not basic:
        for rule in RULES:
            yield from rule(case)


def _warnings(config: DBOConfig, workload: Workload | None) -> Iterator[str]:
    if workload is not None and (total := workload.prefill_tokens + workload.decode_tokens):
        prefill_share = workload.prefill_tokens / total
        if config.all2all_backend == facts.LOW_LATENCY and prefill_share >= MOSTLY:
            yield refusal(
                "low latency is made for decode, and this run is mostly prefill",
                f"--all2all-backend {facts.HIGH_THROUGHPUT} fits",
                prefill_tokens=workload.prefill_tokens,
                decode_tokens=workload.decode_tokens,
            )
        if config.all2all_backend == facts.HIGH_THROUGHPUT and 1 - prefill_share >= MOSTLY:
            yield refusal(
                "high throughput is made for prefill, and this run is mostly decode",
                f"--all2all-backend {facts.LOW_LATENCY} fits",
                prefill_tokens=workload.prefill_tokens,
                decode_tokens=workload.decode_tokens,
            )
    unreachable = min(config.dbo_decode_token_threshold, config.dbo_prefill_token_threshold)
    if config.enable_dbo and unreachable > config.max_num_batched_tokens:
        yield refusal(
            "no step will be split, since none reaches a threshold",
            f"lower the thresholds to {config.max_num_batched_tokens} or less",
            dbo_decode_token_threshold=config.dbo_decode_token_threshold,
            dbo_prefill_token_threshold=config.dbo_prefill_token_threshold,
            max_num_batched_tokens=config.max_num_batched_tokens,
        )
