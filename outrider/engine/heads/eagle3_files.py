"""Read EAGLE-3 heads in the layouts that people hold: the original repository's, SpecForge's, speculators', DeepSpec's.

They differ in names, in what a layer id means, in which norms there are and in what is carried; a wrong reading drafts
fluently and is accepted less. What a file leaves open is named in `HeadFiles.undecided`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from outrider.engine.heads.checkpoint import Checkpoint
from outrider.engine.heads.eagle3 import Eagle3Config, Eagle3Head
from outrider.engine.heads.head_files import (
    agreed_taps,
    complete,
    is_wrapped,
    layer_config,
    layer_ids,
    llama_facts,
    read_tensors,
    take_norm,
)
from outrider.engine.heads.head_network import HeadFiles
from outrider.engine.heads.opening import Norm, OpeningMap, OpeningSpec
from outrider.engine.heads.target_files import TargetFiles
from outrider.wire.errors import ConfigError


def read_eagle3(files: Checkpoint, target: TargetFiles) -> HeadFiles:
    """Read a head for that target. Raises ConfigError for whatever is missing, unknown or does not fit, by its name."""
    return eagle3_of(files, tensors_of(files), target)


def tensors_of(files: Checkpoint) -> dict[str, Tensor]:
    """Return a head's tensors under speculators' names. Raises ConfigError for numbers that cannot be served."""
    return read_tensors(files, _own_name)


def eagle3_of(files: Checkpoint, tensors: dict[str, Tensor], target: TargetFiles) -> HeadFiles:
    """Do as `read_eagle3` with the files' tensors, which are taken over."""
    facts, undecided = _facts(files, tensors, target)
    opening = _take_opening(files, tensors, facts)
    complete(files, tensors, facts, target, Eagle3Head, "an EAGLE-3 head")
    return HeadFiles(facts, tensors, opening, undecided)


def _own_name(name: str) -> str:
    return name.replace("midlayer.", "layers.0.", 1) if name.startswith("midlayer.") else name


def _facts(
    files: Checkpoint, tensors: Mapping[str, Tensor], target: TargetFiles
) -> tuple[Eagle3Config, tuple[str, ...]]:
    config, wrapped = files.config, is_wrapped(files)
    layers = layer_config(files)
    taps = _taps(files, target.num_layers)
    norm = _norm_kind(files, tensors, len(taps))
    carries_normed, reads_normed, open_carry = _norm_output(config, wrapped, norm)
    open_residual = wrapped and "norm_before_residual" not in config
    undecided = ("carries_normed",) * open_carry + ("norm_before_residual",) * open_residual
    facts = Eagle3Config(
        **llama_facts(files, tensors, layers, target, taps),
        norm=norm,
        num_layers=layers.num_hidden_layers,
        norm_before_residual=bool(config.get("norm_before_residual", False)),
        carries_normed=carries_normed,
        reads_normed=reads_normed,
        qk_norms="layers.0.self_attn.q_norm.weight" in tensors,
        qkv_bias="layers.0.self_attn.q_proj.bias" in tensors,
    )
    return facts, undecided


def _taps(files: Checkpoint, num_layers: int) -> tuple[int, ...]:
    """Return the hidden states that the head reads: id k means h[k] at the top level, and h[k + 1] in the nested key of
    SpecForge and in DeepSpec's, which name a layer by its output.
    """
    said_nested = files.config.get("eagle_config")
    nested = said_nested if isinstance(said_nested, dict) else {}
    if nested.get("use_aux_hidden_state") is False:
        raise ConfigError(f"{files.model} reads no taps (use_aux_hidden_state is false), and such heads are not served")
    key = "eagle_aux_hidden_state_layer_ids"
    said = {
        key: layer_ids(files, files.config.get(key), 0),
        f"eagle_config.{key}": layer_ids(files, nested.get(key), 1),
        "target_layer_ids": layer_ids(files, files.config.get("target_layer_ids"), 1),
    }
    return agreed_taps(files, said, (2, num_layers // 2, num_layers - 3), num_layers)


def _norm_kind(files: Checkpoint, tensors: Mapping[str, Tensor], num_taps: int) -> Norm:
    """Return the norm before the opening map, by its tensors; the configuration must not say otherwise."""
    has_each = any(name.startswith("fc_norm.") for name in tensors)
    has_all = "input_norm.weight" in tensors
    if has_each and has_all:
        raise ConfigError(f"{files.model} has fc_norm and input_norm, which exclude each other", param="model")
    for key, has, names in (
        ("fc_norm", has_each, f"fc_norm.0.weight to fc_norm.{num_taps - 1}.weight"),
        ("norm_before_fc", has_all, "input_norm.weight"),
    ):
        says = files.config.get(key)
        if says is not None and bool(says) != has:
            raise ConfigError(
                f"{key} of {files.model} is {says} and {names} {'there' if has else 'missing'}; get the file again or "
                "correct config.json",
                param="model",
            )
    return "each" if has_each else "all" if has_all else "none"


def _norm_output(config: Mapping[str, Any], wrapped: bool, norm: Norm) -> tuple[bool, bool, bool]:
    """Return whether carries are normed, whether the lm_head reads the normed output, and whether the first is open.

    speculators' norm_output says the first. SpecForge's says the second, and its training carries what is not normed,
    also where its exports for 3.1 say true.
    """
    says = config.get("norm_output")
    if wrapped:
        return bool(says), True, False
    return False, says is not False, says is True and norm == "each"


def _take_opening(files: Checkpoint, tensors: dict[str, Tensor], facts: Eagle3Config) -> OpeningMap:
    """Take the opening map's tensors out of `tensors`."""
    taken = {"fc": tensors.pop("fc.weight")}
    if facts.norm != "none":
        is_each = facts.norm == "each"
        names = [f"fc_norm.{i}.weight" for i in range(len(facts.taps))] if is_each else ["input_norm.weight"]
        width = facts.target_width if is_each else facts.target_width * len(facts.taps)
        norms = torch.stack([take_norm(files, tensors, name, width) for name in names]).to(taken["fc"].dtype)
        taken["norm"] = norms if is_each else norms[0]
    return OpeningMap(OpeningSpec(facts.taps, facts.width, facts.norm, facts.epsilon), taken)
