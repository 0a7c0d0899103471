"""Read Medusa's heads under the names of its repository and of vLLM, and blockwise heads, which lack a projection."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from outrider.engine.heads.checkpoint import Checkpoint
from outrider.engine.heads.head_network import HeadFiles
from outrider.engine.heads.maps import check_ids
from outrider.engine.heads.medusa import MedusaConfig, MedusaHeads
from outrider.engine.heads.opening import DTYPES, OpeningMap, OpeningSpec
from outrider.engine.heads.target_files import TargetFiles
from outrider.engine.loading.weight_headers import bounded_build
from outrider.engine.paths.forward_path import NORMED
from outrider.wire.errors import ConfigError

PREFIXES = ("medusa_head.", "medusa_heads.", "medusa_lm_head.")
"""What some files have before every name of a head; other tensors beside them are the base model's."""
_LAYER, _PROJECTION = re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)"), re.compile(r"(\d+)\.(\d+)\.weight")


def read_medusa(files: Checkpoint, target: TargetFiles) -> HeadFiles:
    """Read the heads for that target; they are counted by their tensors, since configs that people hold are wrong.

    Raises ConfigError for whatever is missing, unknown or does not fit, by its name.
    """
    tensors = _named(files)
    _check_values(files, tensors)
    token_map = tensors.pop("token_map", None)
    num_heads, num_layers = _counts(files, tensors)
    vocab_size, is_shared = target.vocab_size, bool(files.config.get("original_lm_head"))
    if "lm_head.weight" in tensors:
        tensors["lm_heads.0.weight"], is_shared = tensors.pop("lm_head.weight"), True
    if not any(name.startswith("lm_heads.") for name in tensors):
        tensors["lm_heads.0.weight"], is_shared = target.projection().to(next(iter(tensors.values())).dtype), True
    projections = [name for name in tensors if name.startswith("lm_heads.")]
    for name in projections:
        tensors[name] = _rows(files, name, tensors[name], token_map, vocab_size)
    if token_map is not None:
        token_map = token_map.to(torch.int64)
        check_ids(files.model, "token_map", token_map, vocab_size)
        tensors["draft_ids"] = token_map
    facts = MedusaConfig(
        num_heads=num_heads,
        num_layers=num_layers,
        width=target.width,
        vocab_size=vocab_size,
        draft_vocab_size=vocab_size if token_map is None else len(token_map),
        shares_projection=is_shared,
        has_bias="blocks.0.layers.0.bias" in tensors,
        scale=float(files.config.get("logit_scale", 1.0)),
    )
    _check_shapes(files, tensors, facts)
    return HeadFiles(facts, tensors, OpeningMap(OpeningSpec((NORMED,), target.width), {}))


def _named(files: Checkpoint) -> dict[str, Tensor]:
    """Return the heads' tensors under vLLM's names."""
    names = files.names
    prefix = next((prefix for prefix in PREFIXES if any(name.startswith(prefix) for name in names)), "")
    raw = {name.removeprefix(prefix): name for name in sorted(names) if name.startswith(prefix)}
    last = max((int(found[2]) for name in raw if (found := _LAYER.fullmatch(name))), default=-1) + 1
    renamed = {}
    for short, name in raw.items():
        renamed[_own_name(short, last)] = files.tensor(name)
    return renamed


def _own_name(name: str, num_layers: int) -> str:
    layer, projection = _LAYER.fullmatch(name), _PROJECTION.fullmatch(name)
    if layer is not None:
        return f"blocks.{layer[1]}.layers.{layer[2]}.{layer[3]}"
    if projection is not None and int(projection[2]) == num_layers:
        return f"lm_heads.{projection[1]}.weight"
    return name


def _check_values(files: Checkpoint, tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if name != "token_map" and (tensor.dtype not in DTYPES or not bool(tensor.isfinite().all())):
            raise ConfigError(
                f"{name} of {files.model} is {tensor.dtype}, must be finite numbers in float32, bfloat16 or float16",
                param="model",
            )


def _counts(files: Checkpoint, tensors: Mapping[str, Tensor]) -> tuple[int, int]:
    """Return how many heads there are, and residual layers of a head."""
    heads = {int(parts[1]) for name in tensors if (parts := name.split("."))[0] in ("blocks", "lm_heads")}
    layers = {int(parts[3]) for name in tensors if (parts := name.split("."))[0] == "blocks" and len(parts) > 3}
    if not heads:
        raise ConfigError(f"{files.model} has no tensors of Medusa heads, such as 0.0.linear.weight", param="model")
    return max(heads) + 1, max(layers, default=-1) + 1


def _rows(files: Checkpoint, name: str, weight: Tensor, token_map: Tensor | None, vocab_size: int) -> Tensor:
    """Return the rows of a projection that are used: those of the map, or all without those of padding."""
    if token_map is not None:
        return weight if len(weight) <= len(token_map) else weight.index_select(0, token_map.to(torch.int64))
    if len(weight) < vocab_size:
        raise ConfigError(
            f"{name} of {files.model} has {len(weight)} rows, and the target's vocabulary {vocab_size}; give the "
            "target that it was made for",
            param="target_model",
        )
    return weight[:vocab_size]


def _check_shapes(files: Checkpoint, tensors: Mapping[str, Tensor], facts: MedusaConfig) -> None:
    with bounded_build(f"the config.json of {files.model}", len(files.names)):
        shapes = {name: tuple(tensor.shape) for name, tensor in MedusaHeads(facts).state_dict().items()}
    unknown, missing = sorted(tensors.keys() - shapes.keys()), sorted(shapes.keys() - tensors.keys())
    if unknown or missing:
        what, names = ("tensors that no Medusa heads have", unknown) if unknown else ("not all tensors", missing)
        raise ConfigError(f"{files.model} has {what}: {', '.join(names[:4])}; get the file again", param="model")
    for name, shape in shapes.items():
        if tuple(tensors[name].shape) != shape:
            raise ConfigError(
                f"{name} of {files.model} is {list(tensors[name].shape)}, and for {facts.width} hidden numbers and "
                f"{facts.vocab_size} ids of the target must be {list(shape)}; give the target that it was made for",
                param="target_model",
            )
