"""What batches, caches and graphs must hold, and what the model and the machine must offer."""

from __future__ import annotations

from collections.abc import Iterator

from dbo.config.case import ConfigUnderTest
from dbo.errors import refusal


def batch_sizes(case: ConfigUnderTest) -> Iterator[str]:
    config, model = case.config, case.model
    if config.max_num_seqs > config.max_num_batched_tokens:
        yield refusal(
            "a step has room for one token of every request",
            "raise --max-num-batched-tokens or lower --max-num-seqs",
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
        )
    if model.max_position_embeddings is not None and config.max_model_len > model.max_position_embeddings:
        yield refusal(
            "sequences stay within the positions that the model knows",
            f"lower --max-model-len to {model.max_position_embeddings}",
            max_model_len=config.max_model_len,
            max_position_embeddings=model.max_position_embeddings,
        )
    # A block of a DCP group holds block_size positions on each of its ranks.
    held = (config.num_kv_blocks - 1) * config.block_size * config.decode_context_parallel_size
    if held < config.max_model_len:
        yield refusal(
            "the KV cache, without its null block, holds one sequence of the longest kind",
            "raise --num-kv-blocks or lower --max-model-len",
            num_kv_blocks=config.num_kv_blocks,
            block_size=config.block_size,
            max_model_len=config.max_model_len,
        )


def captured_sizes(case: ConfigUnderTest) -> Iterator[str]:
    config, sizes = case.config, case.config.capture_sizes
    if sizes is None:
        return
    if config.cudagraph_mode != "FULL":
        yield refusal(
            "capture_sizes mean something only with graphs",
            "add --cudagraph-mode FULL or drop them",
            capture_sizes=sizes,
            cudagraph_mode=config.cudagraph_mode,
        )
        return
    largest = sizes[-1] if sizes else 0
    if largest < config.max_num_seqs:
        yield refusal(
            "the captured sizes reach the largest decode step, one token a request",
            f"add {config.max_num_seqs} to them or lower --max-num-seqs",
            capture_sizes=sizes,
            max_num_seqs=config.max_num_seqs,
        )
    if largest > config.max_num_batched_tokens:
        yield refusal(
            "a step padded to a captured size still fits in the buffers",
            f"drop sizes above {config.max_num_batched_tokens} or raise --max-num-batched-tokens",
            capture_sizes=sizes,
            max_num_batched_tokens=config.max_num_batched_tokens,
        )


def model_family(case: ConfigUnderTest) -> Iterator[str]:
    model = case.model
    if model.scoring_func != "softmax":
        yield refusal(
            "the gate scores experts with softmax", "use a DeepSeek-V2 model", scoring_func=model.scoring_func
        )
    if model.quantization is not None:
        yield refusal(
            "weights are not quantized, and dispatch does not use fp8",
            "use a plain checkpoint",
            quantization=model.quantization,
        )


def visible_devices(case: ConfigUnderTest) -> Iterator[str]:
    config, devices = case.config, case.device.num_devices
    # A machine without any device is not a wrong configuration; `validate` says so with another exit code.
    if config.world == "gpu" and 0 < devices < config.num_ranks:
        yield refusal(
            "world gpu needs one visible device a rank",
            f"lower --data-parallel-size, show {config.num_ranks} devices, or use --world sim",
            num_devices=devices,
            num_ranks=config.num_ranks,
        )
