"""The table of drafts, one entry for each kind: how a checkpoint is recognised, read and run.

A new head is an entry here and a file with its network and its reader: docs/add-a-head.md.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from outrider.engine.files.model_files import MAX_QUOTED
from outrider.engine.heads.checkpoint import Checkpoint, TargetFiles
from outrider.engine.heads.config_keys import Keys
from outrider.engine.heads.dflash import DFlashHead, read_dflash
from outrider.engine.heads.eagle3 import Eagle3Head, read_eagle3, read_peagle
from outrider.engine.heads.head_files import HeadFiles
from outrider.engine.heads.joined import JoinedHead, has_mtp, num_mtp_layers, read_eagle1, read_mtp
from outrider.engine.heads.medusa import MedusaHeads, read_medusa
from outrider.engine.heads.network import MASKED_POSITIONS, BlockShape, HeadNetwork
from outrider.wire.errors import ConfigError
from outrider.wire.peer_text import bound_text

Read = Callable[[Checkpoint, TargetFiles], HeadFiles]
"""Function that reads a head's files for a target. It raises a `ConfigError` that names what is missing, unknown or
does not fit."""
WRAPPED = "speculators_model_type"
"""Key of config.json that names the kind of a head in the layout of the library speculators."""
WEIGHTS = "weights"
"""Key in `HeadKind.signs` whose pattern is compared with the file name of the pickle that holds the weights, instead
of with a value of config.json."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadKind:
    """Kind of heads, or of drafters that are whole models: how its checkpoints are recognised, read and run.

    A checkpoint belongs to the first kind whose `signs` match its configuration. If there is none, it belongs to the
    first kind whose `tensors` match its tensor names.
    """

    label: str
    """Name of the kind in messages for users."""
    name: str = ""
    """Short name of the kind in logs; empty for a kind that is recognised but not served."""
    network: type[HeadNetwork] | None = None
    """Class of the head's network. None for a kind that is recognised but not served, and for drafters that are whole
    models, which another module loads."""
    read: Read | None = None
    """Function that reads the files of the kind's heads; None if `network` is None."""
    paths: tuple[str, ...] = ("paged",)
    """Names of the attention paths that can run the kind, the fastest first; empty for a head without a KV cache."""
    signs: Mapping[str, str] = field(default_factory=dict)
    """Regular expressions by key of config.json, or of the object dflash_config in it. A checkpoint belongs to the kind
    if the value of one key, other than false, contains a match. The key `WEIGHTS` stands for the file name of the
    pickle with the weights."""
    tensors: tuple[str, ...] = ()
    """Patterns of tensor names. A checkpoint matches if each of them matches a whole tensor name in it."""
    forbidden_tensor: str | None = None
    """Name of a tensor that checkpoints of the kind must not have; None = no such condition."""

    def matches(self, files: Checkpoint) -> bool:
        """Return whether the checkpoint's configuration matches one of the patterns in `signs`."""
        fields = {**files.config, **files.part("dflash_config")}
        if files.pickle is not None:
            fields[WEIGHTS] = files.pickle.name
        for key, pattern in self.signs.items():
            value = fields.get(key)
            if value is not None and value is not False and re.search(pattern, str(value)):
                return True
        return False

    def matches_names(self, names: frozenset[str]) -> bool:
        """Return whether the tensor names of a checkpoint match `tensors` and do not contain `forbidden_tensor`. False
        for a kind without patterns.
        """
        if not self.tensors or self.forbidden_tensor in names:
            return False
        return all(_matches_any(pattern, names) for pattern in self.tensors)


def _matches_any(pattern: str, names: Iterable[str]) -> bool:
    return any(re.fullmatch(pattern, name) for name in names)


MODEL = HeadKind(name="model", label="causal language models")
PARD = HeadKind(name="pard", label="PARD", signs={"pard_token": "", "ptd_token_id": ""})
EAGLE3 = HeadKind(
    name="eagle3",
    label="EAGLE-3 and 3.1",
    network=Eagle3Head,
    read=read_eagle3,
    paths=("fused", "paged"),
    signs={WRAPPED: "^eagle3$"},
    tensors=("fc.weight", r"(midlayer|layers\.0)\.hidden_norm\.weight"),
    forbidden_tensor="mask_hidden",
)
EAGLE1 = HeadKind(
    name="eagle1",
    label="EAGLE-1 and 2",
    network=JoinedHead,
    read=read_eagle1,
    tensors=("fc.weight", r"layers\.0\.self_attn\.q_proj\.weight"),
    forbidden_tensor="layers.0.input_layernorm.weight",
)
PEAGLE = HeadKind(
    name="peagle",
    label="P-EAGLE",
    network=Eagle3Head,
    read=read_peagle,
    paths=("fused", "paged"),
    signs={WRAPPED: "^peagle$", "parallel_drafting": "", "architectures": "PEagle"},
    tensors=("mask_hidden",),
)
MTP = HeadKind(
    name="mtp",
    label="MTP heads",
    network=JoinedHead,
    read=read_mtp,
    signs={WRAPPED: "^mtp$"},
)
DSPARK = HeadKind(
    name="dspark",
    label="DSpark",
    network=DFlashHead,
    read=partial(read_dflash, is_dspark=True),
    signs={WRAPPED: "^dspark$", "markov_rank": "", "architectures": "DSpark", "projector_type": "^dspark$"},
)
DFLASH = HeadKind(
    name="dflash",
    label="DFlash",
    network=DFlashHead,
    read=partial(read_dflash, is_dspark=False),
    signs={WRAPPED: "^dflash$", "dflash_config": r"\w", "architectures": "DFlash"},
)
MEDUSA = HeadKind(
    name="medusa",
    label="Medusa, blockwise heads",
    network=MedusaHeads,
    read=read_medusa,
    paths=(),
    signs={"medusa_num_heads": "", "model_type": "^medusa$", WEIGHTS: "^medusa_lm_head.pt$"},
    tensors=(r".*0\.0\.linear\.weight",),
)
OTHER_WRAPPED = HeadKind(
    label="a speculators model of another type",
    signs={WRAPPED: "^(?!(eagle3|mtp|dspark|dflash|peagle)$)"},
)
"""Kind of all heads in the layout of the library speculators that are of no served type, so that they are refused.
It is tried first, since their config.json may also match the `signs` of a kind that is served."""
KINDS = (
    OTHER_WRAPPED,
    EAGLE3,
    MTP,
    HeadKind(label="an MLP speculator", signs={"model_type": "^mlp_speculator$"}),
    HeadKind(label="Hydra heads", signs={"hydra_num_heads": "", WEIGHTS: "^hydra_lm_head.pt$"}),
    HeadKind(label="a DFlash2 head", signs={"selector_rank": "", "architectures": "DFlash2"}),
    HeadKind(label="a Domino head", signs={"architectures": "Domino", "projector_type": "^domino$"}),
    HeadKind(label="a Gemma 4 assistant", signs={"model_type": "gemma4_assistant", "architectures": "Gemma4Assistant"}),
    HeadKind(
        label="an MTP head apart from its target's checkpoint, not in speculators' layout",
        signs={"model_type": "_mtp$", "architectures": "MTP"},
        tensors=(r"mtp(_layers)?\..*",),
        forbidden_tensor="lm_head.weight",
    ),
    EAGLE1,
    DSPARK,
    DFLASH,
    PEAGLE,
    MEDUSA,
    HeadKind(label="a head of an unknown kind (with fc.weight)", tensors=("fc.weight",)),
)
"""Kinds in the order in which they are tried. A checkpoint that matches none of them is a whole model: of the kind
PARD if its config.json has the token id of PARD's masks, otherwise of the kind MODEL."""


def kind_of(files: Checkpoint, target: str | None = None) -> HeadKind:
    """Return the kind of a drafter's checkpoint, by its configuration or else by the names of its tensors.

    `target`: folder or hub id of the target. If the checkpoint is the target's own and has MTP layers, the drafter is
    the MTP head in it. Raises a `ConfigError` that names the kind if it is not served, and a `ConfigError` if the
    tensor names are in a pickle that may not be read.
    """
    if target is not None and is_same(files.model, target) and (num_layers := num_mtp_layers(files)):
        if not has_mtp(files.names):
            raise ConfigError(
                f"{files.model} is the target itself, whose config.json has {num_layers} layers for multi-token "
                "prediction and whose files have none; get the whole checkpoint, or name another draft",
                param="model",
            )
        return MTP
    kind = _recognised(files)
    if kind.network is None and kind not in (MODEL, PARD):
        labels = [row.label for row in KINDS if row.network is not None]
        found = kind.label
        if kind is OTHER_WRAPPED:
            found = f"{found}, {bound_text(repr(files.config.get(WRAPPED)), MAX_QUOTED)}"
        raise ConfigError(
            f"{files.model} holds {found}, which is not served; served are {', '.join(labels)}, "
            f"{PARD.label} and {MODEL.label}",
            param="model",
        )
    return kind


def is_same(model: str, target: str) -> bool:
    """Return whether a drafter's checkpoint and a target's, each a folder or hub id, are the same hub id or the same
    folder.
    """
    own, other = Path(model), Path(target)
    return model == target or (own.exists() and other.exists() and own.samefile(other))


def _recognised(files: Checkpoint) -> HeadKind:
    for row in KINDS:
        if row.matches(files):
            return row
    # Original EAGLE files name an ordinary model's class, and are known by their tensors alone.
    may_be_head = "draft_vocab_size" in files.config or files.config.get("num_hidden_layers") == 1
    if files.pickle is None or may_be_head:  # an ordinary pickled model is not opened
        for row in KINDS:
            if row.matches_names(files.names):
                return row
    if PARD.matches(files):
        return PARD
    return MODEL


def pard_block(files: Checkpoint) -> BlockShape:
    """Return the layout of the blocks that a PARD drafter fills. Raises `ConfigError` if the id of the mask token is
    outside the drafter's vocabulary.
    """
    keys = Keys(files)
    vocab_size = keys.number("vocab_size", min_value=1)
    return BlockShape(MASKED_POSITIONS, keys.number(*PARD.signs, min_value=0, max_value=vocab_size - 1))
