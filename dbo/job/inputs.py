"""What a run of the main job is made of: a model folder, a schedule, prompts, programs."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from dbo import registry
from dbo.config import DBOConfig, ModelShape
from dbo.engine.components import Components
from dbo.errors import UsageError
from dbo.job.rank import CleanPrograms, RequestSpec
from dbo.job.types import CheckRequest, Progress
from dbo.model.config import ModelConfig
from dbo.schedule import Schedule, load_schedule, parse_schedule

PROMPTS = (
    "Two batches, one baton.",
    "While one waits, the other computes.",
    "hi",
    "All ranks must agree to split.",
    "Order matters.",
    "A prompt that straddles the split.",
    "Padding?",
    "Dispatch, experts, combine.",
)

# The simulator carries the model's dtype through the low-latency exchange, so that fp32 logits can be compared tightly.
# A device carries bf16 there, and world gpu refuses fp32.
SIM_CAPABILITIES = ("any_dtype",)


def scratch() -> Path:
    """This user's folder for what is made again whenever it is missing: others of the machine have their own."""
    try:
        folder = Path(tempfile.gettempdir()) / f"dbo-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise _no_room(error) from error
    return folder


def _no_room(error: OSError) -> UsageError:
    rule = "what is generated is kept in a folder of this user among the temporary files"
    why = f"{error.strerror or error} ({error.filename})" if error.filename else error.strerror or error
    return UsageError.of(rule, fix="make room there, or set TMPDIR to another folder", why=why)


def generated_folder(request: CheckRequest, progress: Progress) -> Path:
    """The generated model folder of this seed, made on first use; without weights, and so without torch, for ordering."""
    kind = "frame" if request.mode == "ordering" else f"model-{request.seed}"
    folder = scratch() / f"{kind}-v1"
    if _is_whole(folder, request.mode):
        return folder
    progress.stage("generating the model folder")
    write = _generator(request)
    try:
        # Made aside and renamed, so that two processes at once, or one that is interrupted, leave a whole folder.
        with tempfile.TemporaryDirectory(prefix="model-", dir=scratch(), ignore_cleanup_errors=True) as aside:
            made, leftover = Path(aside, "made"), Path(aside, "leftover")
            write(made)
            if not _is_whole(folder, request.mode):
                with contextlib.suppress(FileNotFoundError):
                    folder.rename(leftover)
            try:
                made.rename(folder)
            except OSError:
                if not _is_whole(folder, request.mode):
                    raise
    except OSError as error:
        raise _no_room(error) from error
    return folder


def _generator(request: CheckRequest) -> Callable[[Path], object]:
    if request.mode == "ordering":
        from dbo.model.config_folder import write_frame

        return write_frame
    from dbo.model.generator import generate_model_folder

    return partial(generate_model_folder, seed=request.seed)


def _is_whole(folder: Path, mode: str) -> bool:
    """Whether all files are there: who tidies temporary files up takes them one by one and leaves folders."""
    names = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]
    names += [] if mode == "ordering" else ["model.safetensors"]
    return all((folder / name).is_file() for name in names)


def schedule_of(config: DBOConfig) -> Schedule:
    text = config.dbo_schedule
    return parse_schedule(text) if "\n" in text else load_schedule(text)


def shape_of(config: ModelConfig) -> ModelShape:
    return ModelShape(
        hidden_size=config.hidden_size,
        num_experts=config.n_routed_experts,
        num_heads=config.num_attention_heads,
        max_position_embeddings=config.max_position_embeddings,
    )


def prompts_of(request: CheckRequest, config: DBOConfig, folder: Path, model_config: ModelConfig) -> list[list[int]]:
    from dbo.model.tokenizer import load_tokenizer

    limit = config.max_model_len - request.steps - 1
    if limit < 1:
        rule = "prompt and output fit in the model length"
        raise UsageError.of(rule, fix="lower --steps", steps=request.steps, max_model_len=config.max_model_len)
    tokenizer = load_tokenizer(folder)
    if request.prompts is None:
        return [list(tokenizer.encode(text)) for text in PROMPTS]
    return request.prompts.encode(encode=tokenizer.encode, vocab_size=model_config.vocab_size, max_tokens=limit)


def spread(prompts: Sequence[Sequence[int]], ranks: int, max_new_tokens: int) -> list[list[RequestSpec]]:
    """Prompts to ranks in turn."""
    spread: list[list[RequestSpec]] = [[] for _ in range(ranks)]
    for index, prompt in enumerate(prompts):
        spread[index % ranks].append(
            RequestSpec(id=f"request-{index}", prompt_token_ids=tuple(prompt), max_new_tokens=max_new_tokens)
        )
    return spread


def programs_of(request: CheckRequest, config: DBOConfig) -> Callable[[int], Components]:
    if request.inject is None:
        return CleanPrograms()
    fault, where = fault_of(request, request.inject)
    programs = fault.programs(config, where)
    if fault.numeric and request.mode == "ordering":
        rule = f"--inject {fault.name} changes what only a run with numbers has"
        raise UsageError.of(rule, fix="use --mode numeric", mode=request.mode)
    return programs


def fault_of(request: CheckRequest, inject: str) -> tuple[registry.FaultInfo, str]:
    """The fault that `--inject` names, and the place that it gives."""
    name, _, where = inject.partition(":")
    for fault in registry.faults(request.world):
        if fault.name == name:
            return fault, where
    known = ", ".join(fault.name for fault in registry.faults(request.world))
    raise UsageError.of("--inject names a fault", fix=f"choose one of {known}, or list", inject=name)


def replay_line(request: CheckRequest) -> str:
    """The command that runs the same again."""
    from dbo.config import FLAGS

    words = ["dbo check", f"--seed {request.seed}"]
    for flag in FLAGS:
        if flag.field in request.flags and flag.field != "seed":
            words += flag.typed(request.flags[flag.field])
    words += [f"--model {request.model}"] if request.model else []
    words += [f"--prompts {request.prompts.name}"] if request.prompts is not None else []
    words += [f"--steps {request.steps}"] if request.steps != 8 else []
    words += [f"--mode {request.mode}"] if request.mode != "numeric" else []
    words += [f"--inject {request.inject}"] if request.inject else []
    words += [f"--device {request.device}"] if request.device != "auto" else []
    words += ["--share-device"] if request.share_device else []
    return " ".join(words)
