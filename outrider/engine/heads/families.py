"""The table of drafts: one row a family. A checkpoint is recognised, read, run, wired and drafted with by its row.

A new head is a row here and a file with its network and its reader: docs/add-a-head.md.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from outrider.engine.heads.checkpoint import Checkpoint, TargetFiles
from outrider.engine.heads.dflash import DFlashHead, read_dflash
from outrider.engine.heads.eagle3 import Eagle3Head, read_eagle3, read_peagle
from outrider.engine.heads.head_files import HeadFiles, Keys
from outrider.engine.heads.joined import JoinedHead, has_mtp, num_mtp_layers, read_eagle1, read_mtp
from outrider.engine.heads.medusa import MedusaHeads, read_medusa
from outrider.engine.heads.network import MASKED_POSITIONS, BlockShape, HeadNetwork
from outrider.wire.errors import ConfigError
from outrider.wire.model_id import is_gguf

Read = Callable[[Checkpoint, TargetFiles], HeadFiles]
"""Reads a head's files for a target. Raises ConfigError for what is missing, unknown or does not fit, by its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A kind of draft. The first row that the configuration matches is taken; where it matches none, the first whose
    names of tensors are there.
    """

    name: str
    """As speculators name it in `speculators_model_type`, where they do."""
    label: str
    """As users read it."""
    network: type[HeadNetwork] | None = None
    """None for a family that is recognised and not served, and for models, which their own loader reads and runs."""
    read: Read | None = None
    """As `network`."""
    paths: tuple[str, ...] = ("paged",)
    """Attention paths that may run it, the fastest first; none for a head without a cache."""
    is_wrapped: bool = False
    """Whether speculators' layout is read."""
    signs: Mapping[str, str] = field(default_factory=dict)
    """By key of config.json or of its dflash_config, a pattern of its value; one is enough. False is as good as none.
    """
    pickle: str | None = None
    """Name of the file of weights."""
    tensors: tuple[str, ...] = ()
    """Patterns of names of tensors, each of which is there."""
    lacks: str | None = None
    """Name of a tensor that is not there."""

    def matches(self, files: Checkpoint) -> bool:
        """Return whether the configuration is of this family."""
        fields = {**files.config, **files.part("dflash_config")}
        for key, pattern in self.signs.items():
            value = fields.get(key)
            if value is not None and value is not False and re.search(pattern, str(value)):
                return True
        return False

    def holds(self, names: frozenset[str]) -> bool:
        """Return whether these are the names of its tensors."""
        if not self.tensors or self.lacks in names:
            return False
        return all(any(re.fullmatch(pattern, name) for name in names) for pattern in self.tensors)


MODEL = Family(name="model", label="causal language models")
PARD = Family(name="pard", label="PARD", signs={"pard_token": "", "ptd_token_id": ""})
EAGLE3 = Family(
    name="eagle3",
    label="EAGLE-3 and 3.1",
    network=Eagle3Head,
    read=read_eagle3,
    paths=("fused", "paged"),
    is_wrapped=True,
    tensors=("fc.weight", r"(midlayer|layers\.0)\.hidden_norm\.weight"),
    lacks="mask_hidden",
)
EAGLE1 = Family(
    name="eagle1",
    label="EAGLE-1 and 2",
    network=JoinedHead,
    read=read_eagle1,
    tensors=("fc.weight", r"layers\.0\.self_attn\.q_proj\.weight"),
    lacks="layers.0.input_layernorm.weight",
)
PEAGLE = Family(
    name="peagle",
    label="P-EAGLE",
    network=Eagle3Head,
    read=read_peagle,
    paths=("fused", "paged"),
    is_wrapped=True,
    signs={"parallel_drafting": "", "architectures": "PEagle"},
    tensors=("mask_hidden",),
)
MTP = Family(
    name="mtp",
    label="MTP heads",
    network=JoinedHead,
    read=read_mtp,
    is_wrapped=True,
)
DSPARK = Family(
    name="dspark",
    label="DSpark",
    network=DFlashHead,
    read=partial(read_dflash, is_dspark=True),
    is_wrapped=True,
    signs={"markov_rank": "", "architectures": "DSpark", "projector_type": "^dspark$"},
)
DFLASH = Family(
    name="dflash",
    label="DFlash",
    network=DFlashHead,
    read=partial(read_dflash, is_dspark=False),
    is_wrapped=True,
    signs={"dflash_config": r"\w", "architectures": "DFlash"},
)
MEDUSA = Family(
    name="medusa",
    label="Medusa, blockwise heads",
    network=MedusaHeads,
    read=read_medusa,
    paths=(),
    signs={"medusa_num_heads": "", "model_type": "^medusa$"},
    pickle="medusa_lm_head.pt",
    tensors=(r".*0\.0\.linear\.weight",),
)
FAMILIES = (
    Family(name="mlp", label="an MLP speculator", signs={"model_type": "^mlp_speculator$"}),
    Family(name="hydra", label="Hydra heads", signs={"hydra_num_heads": ""}, pickle="hydra_lm_head.pt"),
    Family(name="dflash2", label="a DFlash2 head", signs={"selector_rank": "", "architectures": "DFlash2"}),
    Family(name="domino", label="a Domino head", signs={"architectures": "Domino", "projector_type": "^domino$"}),
    Family(
        name="gemma4",
        label="a Gemma 4 assistant",
        signs={"model_type": "gemma4_assistant", "architectures": "Gemma4Assistant"},
    ),
    Family(
        name="mtp apart",
        label="an MTP head apart from its target's checkpoint, not in speculators' layout",
        signs={"model_type": "_mtp$", "architectures": "MTP"},
        tensors=(r"mtp(_layers)?\..*",),
        lacks="lm_head.weight",
    ),
    EAGLE3,
    EAGLE1,
    DSPARK,
    DFLASH,
    PEAGLE,
    MTP,
    MEDUSA,
    Family(name="fc", label="a head of an unknown kind (with fc.weight)", tensors=("fc.weight",)),
)
"""In the order in which they are tried. What is none of them is PARD or MODEL."""


def family_of(files: Checkpoint, target: str | None = None) -> Family:
    """Return the family, by the configuration where it tells and else by the names of tensors.

    target: the folder or hub id of the target; the same as the draft's, it means the MTP head inside, where there is
    one. Raises ConfigError for a family that is not served, by its label, and as `Checkpoint.names` does.
    """
    if is_gguf(files.model):
        return MODEL
    if target is not None and is_same(files.model, target) and (num_layers := num_mtp_layers(files)):
        if not has_mtp(files.names):
            raise ConfigError(
                f"{files.model} is the target itself, whose config.json has {num_layers} layers for multi-token "
                "prediction and whose files have none; get the whole checkpoint, or name another draft",
                param="model",
            )
        return MTP
    family = _recognised(files)
    if family.network is None and family not in (MODEL, PARD):
        labels = [row.label for row in FAMILIES if row.network is not None]
        raise ConfigError(
            f"{files.model} holds {family.label}, which is not served; served are {', '.join(labels)}, "
            f"{PARD.label} and {MODEL.label}",
            param="model",
        )
    return family


def is_same(model: str, target: str) -> bool:
    """Return whether both are one hub id, or one folder."""
    return model == target or (os.path.exists(model) and os.path.exists(target) and os.path.samefile(model, target))


def _recognised(files: Checkpoint) -> Family:
    wrapped = files.config.get("speculators_model_type")
    if wrapped is not None and (wrapped != "dflash" or files.config.get("projector_type") in (None, "dflash")):
        unknown = Family(name="wrapped", label=f"a speculators model of type {wrapped!r}")
        return next((row for row in FAMILIES if row.is_wrapped and row.name == wrapped), unknown)
    for row in FAMILIES:
        if row.matches(files):
            return row
    # Original EAGLE files name an ordinary model's class, and are known by their tensors alone.
    pickle = files.pickle
    for row in FAMILIES:
        if pickle is not None and row.pickle == pickle.name:
            return row
    may_be_head = "draft_vocab_size" in files.config or files.config.get("num_hidden_layers") == 1
    if pickle is None or may_be_head:  # an ordinary pickled model is not opened
        for row in FAMILIES:
            if row.holds(files.names):
                return row
    return PARD if PARD.matches(files) else MODEL


def pard_block(files: Checkpoint) -> BlockShape:
    """Return how a PARD draft fills masks. Raises ConfigError for a masked id that its vocabulary lacks."""
    keys = Keys(files)
    vocab_size = keys.number("vocab_size", least=1)
    return BlockShape(MASKED_POSITIONS, keys.number(*PARD.signs, least=0, most=vocab_size - 1))
