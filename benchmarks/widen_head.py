"""Make a draft head fit the widened target: the same logits from hidden states with more columns, which are zeros.

Layers are added behind the others, so the hidden states that a head reads keep their numbers. What reads one of them
gets columns of zeros; Medusa's heads, which are as wide as the target, are widened whole and cost what wider ones cost.
"""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import pad

from outrider.engine.heads.checkpoint import Checkpoint, TargetFiles
from outrider.engine.heads.eagle3 import read_eagle3
from outrider.engine.heads.families import EAGLE3, MEDUSA, family_of
from outrider.engine.heads.medusa import read_medusa
from outrider.engine.loading.embedding_files import FILE as EMBEDDINGS_FILE
from outrider.engine.loading.embedding_files import NAME as EMBEDDINGS
from outrider.engine.loading.embedding_files import read_embeddings
from outrider.lab.models.widening import WideningError


def widen_head(head: Path, target: Path, wide: Path, destination: Path) -> None:
    """Write the head of `target` in `head` as one of `wide`, made of that target by `outrider.lab.models.widening`.

    Raises WideningError for a folder that holds no EAGLE-3 or Medusa head, or one with norms over the hidden states of
    the target: their epsilon would have to change, and is that of the head's other norms.
    """
    files, old, new = Checkpoint(str(head)), TargetFiles(str(target)), TargetFiles(str(wide))
    family = family_of(files)
    if family is EAGLE3:
        tensors, config = _eagle3(files, old, new.width)
    elif family is MEDUSA:
        tensors, config = _medusa(files, old, new.width)
    else:
        raise WideningError(f"{head} holds a {family.name}; only EAGLE-3 and Medusa heads are widened")
    destination.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, destination / "model.safetensors")
    (destination / "config.json").write_text(json.dumps({**files.config, **config}), encoding="utf-8")


def widen_embeddings(source: Path, target: Path, wide: Path, destination: Path) -> None:
    """Write the look-ahead embeddings of `target` as those of `wide`, as `widen_head` does. Raises ConfigError."""
    old, new = TargetFiles(str(target)), TargetFiles(str(wide))
    tensor = pad(read_embeddings(str(source), old.width), (0, new.width - old.width))  # [L, width]
    save_file({EMBEDDINGS: tensor.contiguous()}, destination / EMBEDDINGS_FILE)


def _eagle3(files: Checkpoint, target: TargetFiles, width: int) -> tuple[dict[str, Tensor], dict[str, object]]:
    """Return tensors, and what is to be said in config.json. What the head left to the target is the narrow one's."""
    read = read_eagle3(files, target)
    if read.projection.spec.norm != "none":
        raise WideningError(f"{files.model} norms the hidden states that it reads; only heads that do not are widened")
    tensors = {name: files.tensor(name) for name in files.names}
    for name in ("embed_tokens.weight", "lm_head.weight"):
        tensors.setdefault(name, read.tensors[name].clone())  # where both are tied they would share memory
    by_tap = tensors["fc.weight"].view(-1, len(read.facts.taps), target.width)  # [d, m, dt]
    tensors["fc.weight"] = pad(by_tap, (0, width - target.width)).flatten(1)
    return tensors, {"target_hidden_size": width, "eagle_aux_hidden_state_layer_ids": list(read.facts.taps)}


def _medusa(files: Checkpoint, target: TargetFiles, width: int) -> tuple[dict[str, Tensor], dict[str, object]]:
    """As `_eagle3`, under vLLM's names."""
    read = read_medusa(files, target)
    more = width - target.width
    tensors = dict(read.tensors)
    for name, tensor in read.tensors.items():
        if name.startswith("blocks."):
            tensors[name] = pad(tensor, (0, more, 0, more) if tensor.dim() == 2 else (0, more))
        elif name.startswith("lm_heads."):
            tensors[name] = pad(tensor, (0, more))
    if read.facts.shares_projection:
        tensors["lm_head.weight"] = tensors.pop("lm_heads.0.weight")
    if "draft_ids" in tensors:
        tensors["token_map"] = tensors.pop("draft_ids")
    return tensors, {"model_type": "medusa", "hidden_size": width}
