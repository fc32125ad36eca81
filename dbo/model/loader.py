"""Reading a model folder's weights: safetensors only, this rank's routed experts only. Needs torch and safetensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

from dbo.config.paths import refuse_irregular
from dbo.errors import ModelFormatError, NotAvailable
from dbo.model.config import ModelConfig
from dbo.model.fields import bad_model, read_json
from dbo.model.layout import INV_FREQ, LM_HEAD, Shape, checkpoint_shapes, expert_prefix, layer_prefix, local_experts
from dbo.model.rope import rope_inv_freq

try:
    from safetensors import SafetensorError, safe_open
except ImportError as error:
    raise NotAvailable.of(
        "reading weights needs a package", fix="install safetensors", package="safetensors"
    ) from error

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.bin.index.json")
FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")


def load_weights(
    folder: str | Path, config: ModelConfig, *, ep_rank: int = 0, ep_size: int = 1, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """CPU tensors of `folder`, ready for `DeepseekV2ForCausalLM`.

    Checkpoint names, except that gate and up projections are joined (`gate_up_proj.weight` `[2I, H]`), that this rank's
    L routed experts are stacked (`mlp.experts.gate_up_proj` `[L, 2I, H]`, `mlp.experts.down_proj` `[L, I, H]`), and
    that `model.rotary_emb.inv_freq` is added. The router's weight is fp32, whatever `dtype` is.

    Raises:
        ModelFormatError: no safetensors, a pickled checkpoint, a corrupt file, a tensor missing, unknown or mis-shaped.
        ConfigError: the experts cannot be spread evenly over `ep_size` ranks.
    """
    local = local_experts(config, ep_rank=ep_rank, ep_size=ep_size)
    expected = checkpoint_shapes(config)
    weights: dict[str, torch.Tensor] = {}
    seen: set[str] = set()
    for path in _checkpoint_files(Path(folder)):
        for name, read in _tensors(path, expected, tied=config.tie_word_embeddings):
            seen.add(name)
            if _is_local(name, local):
                weights[name] = read().to(torch.float32 if name.endswith(".mlp.gate.weight") else dtype)
    missing = [name for name in expected if name not in seen]
    if missing:
        raise bad_model(
            "every tensor of the model is in the checkpoint",
            "download it again",
            folder=folder,
            missing=len(missing),
            first=missing[0],
        )
    _join(weights, config, local)
    weights[INV_FREQ] = rope_inv_freq(config)
    return weights


def _checkpoint_files(folder: Path) -> list[Path]:
    if (folder / INDEX).exists():
        weight_map = read_json(folder / INDEX).get("weight_map")
        shards = list(weight_map.values()) if isinstance(weight_map, dict) else []
        strangers = [shard for shard in shards if not isinstance(shard, str) or Path(shard).name != shard]
        if not shards or strangers:
            fix, found = "download the index again", strangers[:1] or weight_map
            raise bad_model("the index maps tensors to files of its own folder", fix, file=folder / INDEX, found=found)
        return [folder / shard for shard in sorted(set(shards))]
    if (folder / SINGLE).exists():
        return [folder / SINGLE]
    pickled = sorted(path.name for pattern in PICKLED for path in folder.glob(pattern))
    if pickled:
        fix = "convert it to safetensors"
        raise bad_model("a pickled checkpoint can run code and is never opened", fix, folder=folder, file=pickled[0])
    raise bad_model(f"weights are in {SINGLE} or behind {INDEX}", "download the weights", folder=folder)


def _tensors(path: Path, expected: dict[str, Shape], *, tied: bool) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
    """Name and reader of each tensor in one file, its header checked; bytes are read only when the reader is called."""
    try:
        refuse_irregular(path, what="a safetensors file", error=ModelFormatError)
        with safe_open(path, framework="pt", device="cpu") as file:
            for name in sorted(file.keys()):
                if name.endswith("rotary_emb.inv_freq") or (tied and name == LM_HEAD):
                    continue  # derived: older checkpoints store the first, some tied ones the second
                header = file.get_slice(name)
                _check(path, name, tuple(header.get_shape()), header.get_dtype(), expected.get(name))
                yield name, partial(file.get_tensor, name)
    except (OSError, SafetensorError) as error:
        raise bad_model(
            "the checkpoint is made of readable safetensors files", "download it again", file=path, error=error
        ) from error


def _is_local(name: str, local: range) -> bool:
    """Whether this rank needs the tensor: routed experts live on one rank each, everything else on all."""
    _, routed, rest = name.partition(".mlp.experts.")
    return not routed or int(rest.split(".")[0]) in local


def _check(path: Path, name: str, shape: tuple[int, ...], dtype: str, expected: Shape | None) -> None:
    if expected is None:
        fix = "use a checkpoint that matches its config.json"
        raise bad_model("every tensor of the checkpoint is used", fix, file=path, unknown=name)
    if shape != expected:
        fix = "use a checkpoint that matches its config.json"
        raise bad_model(
            "config.json gives this tensor's shape", fix, file=path, tensor=name, expected=expected, found=shape
        )
    if dtype not in FLOAT_DTYPES:
        raise bad_model("weights are not quantised", "use the bf16 checkpoint", file=path, tensor=name, dtype=dtype)


def _join(weights: dict[str, torch.Tensor], config: ModelConfig, local: range) -> None:
    """Replace the projections by those that the forward multiplies with: fewer and larger."""

    def take_gate_up(prefix: str) -> torch.Tensor:
        return torch.cat([weights.pop(f"{prefix}.{half}_proj.weight") for half in ("gate", "up")])

    for layer in range(config.num_hidden_layers):
        mlp = f"{layer_prefix(layer)}.mlp"
        if not config.is_moe_layer(layer):
            weights[f"{mlp}.gate_up_proj.weight"] = take_gate_up(mlp)
            continue
        weights[f"{mlp}.shared_experts.gate_up_proj.weight"] = take_gate_up(f"{mlp}.shared_experts")
        prefixes = [expert_prefix(layer, expert) for expert in local]
        weights[f"{mlp}.experts.gate_up_proj"] = torch.stack([take_gate_up(prefix) for prefix in prefixes])
        down = [weights.pop(f"{prefix}.down_proj.weight").t() for prefix in prefixes]
        weights[f"{mlp}.experts.down_proj"] = torch.stack(down).contiguous()
