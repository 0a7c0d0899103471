"""Say what kind of draft a folder holds. Called by the draft worker before anything is loaded."""

from __future__ import annotations

import enum
import os
from typing import Any

from outrider.engine.heads.checkpoint import Checkpoint
from outrider.engine.heads.joined_files import has_mtp, num_mtp_layers
from outrider.wire.errors import ConfigError
from outrider.wire.model_id import is_gguf


class DraftKind(enum.StrEnum):
    MODEL = "model"
    """An ordinary causal language model."""
    PARD = "pard"
    """A causal language model that was trained to fill several masked positions at once."""
    EAGLE3 = "eagle3"
    """EAGLE-3 and 3.1."""
    MEDUSA = "medusa"
    """Medusa's heads, and blockwise ones, which share the target's projection."""
    DFLASH = "dflash"
    """DFlash: a block of positions in one pass."""
    DSPARK = "dspark"
    """DFlash with a sequential head on top."""
    EAGLE1 = "eagle1"
    """EAGLE-1 and 2."""
    MTP = "mtp"
    """The head for multi-token prediction of a target, inside its checkpoint or in speculators' own file."""
    PEAGLE = "peagle"
    """P-EAGLE: EAGLE-3 that fills masked positions."""


WRAPPED = (DraftKind.EAGLE3, DraftKind.MTP, DraftKind.PEAGLE, DraftKind.DFLASH, DraftKind.DSPARK)
"""Kinds that speculators name so."""
SERVED = (
    "EAGLE-3 and 3.1, EAGLE-1 and 2, P-EAGLE, MTP heads, DFlash, DSpark, Medusa, blockwise heads, PARD and causal "
    "language models"
)


def kind_of(files: Checkpoint, target: str | None = None) -> DraftKind:
    """Return the kind, by the configuration where it tells and else by the names of tensors.

    target: the folder or hub id of the target; the same as the draft's, it means the MTP head inside, where there is
    one. Raises ConfigError for a kind that is not served, by its name, and as `Checkpoint.names` does.
    """
    if is_gguf(files.model):
        return DraftKind.MODEL
    if target is not None and is_same(files.model, target) and (num_layers := num_mtp_layers(files.config)):
        if not has_mtp(files.names):
            raise ConfigError(
                f"{files.model} is the target itself, whose config.json has {num_layers} layers for multi-token "
                "prediction and whose files have none; get the whole checkpoint, or name another draft",
                param="model",
            )
        return DraftKind.MTP
    kind = _by_config(files.config) or _by_tensors(files) or _causal(files.config)
    if isinstance(kind, DraftKind):
        return kind
    raise ConfigError(f"{files.model} holds {kind}, which is not served; served are {SERVED}", param="model")


def is_same(model: str, target: str) -> bool:
    """Return whether both are one hub id, or one folder."""
    return model == target or (os.path.exists(model) and os.path.exists(target) and os.path.samefile(model, target))


def _by_config(config: dict[str, Any]) -> DraftKind | str | None:
    """Return a kind, the name of one that is not served, or None where tensors must tell."""
    wrapped = config.get("speculators_model_type")
    if wrapped is not None and (wrapped != "dflash" or config.get("projector_type") in (None, "dflash")):
        kinds = {kind.value: kind for kind in WRAPPED}
        return kinds.get(wrapped) or f"a speculators model of type {wrapped!r}"
    model_type, found = str(config.get("model_type", "")), str(config.get("architectures", ""))
    block = config["dflash_config"] if isinstance(config.get("dflash_config"), dict) else {}
    projector = block.get("projector_type", config.get("projector_type"))
    if model_type == "mlp_speculator":
        return "an MLP speculator"
    if model_type == "medusa" or "medusa_num_heads" in config:
        return DraftKind.MEDUSA
    if "hydra_num_heads" in config:
        return "Hydra heads"
    if "DFlash2" in found or "selector_rank" in block:
        return "a DFlash2 head"
    if "DSpark" in found or projector == "dspark" or "markov_rank" in config:
        return DraftKind.DSPARK
    if "Domino" in found or projector == "domino":
        return "a Domino head"
    if "DFlash" in found or block:
        return DraftKind.DFLASH
    if "PEagle" in found or config.get("parallel_drafting"):
        return DraftKind.PEAGLE
    if "gemma4_assistant" in model_type or "Gemma4Assistant" in found:
        return "a Gemma 4 assistant"
    if model_type.endswith("_mtp") or "MTP" in found:
        return "an MTP head apart from its target's checkpoint, not in speculators' layout"
    return None


def _by_tensors(files: Checkpoint) -> DraftKind | str | None:
    """As _by_config; original EAGLE files say LlamaForCausalLM and are known by their tensors alone."""
    if files.pickle is not None and files.pickle.name == "medusa_lm_head.pt":
        return DraftKind.MEDUSA
    if files.pickle is not None and files.pickle.name == "hydra_lm_head.pt":
        return "Hydra heads"
    says_head = "draft_vocab_size" in files.config or files.config.get("num_hidden_layers") == 1
    if files.pickle is not None and not says_head:
        return None
    names = files.names
    if any(name.endswith("0.0.linear.weight") for name in names):
        return DraftKind.MEDUSA
    if "mask_hidden" in names:
        return DraftKind.PEAGLE
    if "fc.weight" in names:
        if {"midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight"} & names:
            return DraftKind.EAGLE3
        if "layers.0.self_attn.q_proj.weight" in names and "layers.0.input_layernorm.weight" not in names:
            return DraftKind.EAGLE1
        return "a head of an unknown kind (with fc.weight)"
    if any(name.startswith(("mtp.", "mtp_layers.")) for name in names) and "lm_head.weight" not in names:
        return "an MTP head"
    return None


def _causal(config: dict[str, Any]) -> DraftKind:
    return DraftKind.MODEL if _pard_key(config) is None else DraftKind.PARD


def _pard_key(config: dict[str, Any]) -> str | None:
    return next((key for key in ("pard_token", "ptd_token_id") if config.get(key) is not None), None)


def pard_token(files: Checkpoint) -> int:
    """Return the id that stands for a masked position of a PARD draft. Raises ConfigError for one that it lacks."""
    key, vocab_size = _pard_key(files.config), files.config.get("vocab_size")
    token = files.config.get(key) if key is not None else None
    if not isinstance(token, int) or not isinstance(vocab_size, int) or not 0 <= token < vocab_size:
        raise ConfigError(
            f"{key or 'pard_token'} of {files.model} is {token!r}, must be an id of its vocabulary of {vocab_size}",
            param="model",
        )
    return token
