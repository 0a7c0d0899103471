"""Read P-EAGLE heads: EAGLE-3's tensors and a stand-in for the hidden states of positions that are not there yet."""

from __future__ import annotations

from dataclasses import replace

from outrider.engine.heads.checkpoint import Checkpoint
from outrider.engine.heads.eagle3_files import eagle3_of, tensors_of
from outrider.engine.heads.head_network import HeadFiles, MaskEntry
from outrider.engine.heads.target_files import TargetFiles
from outrider.wire.errors import ConfigError

KEYS = ("mask_token_id", "pard_token", "ptd_token_id")
"""speculators' name of the masked id, and vLLM's."""


def read_peagle(files: Checkpoint, target: TargetFiles) -> HeadFiles:
    """Read a head for that target. The stand-in goes through the opening map here, once.

    Raises ConfigError for whatever is missing, unknown or does not fit, by its name.
    """
    tensors = tensors_of(files)
    hidden = tensors.pop("mask_hidden", None)
    if hidden is None:
        raise ConfigError(f"{files.model} has no mask_hidden, which a P-EAGLE head needs; get the file again")
    key = next((key for key in KEYS if files.config.get(key) is not None), KEYS[0])
    mask_id = files.config.get(key)
    if type(mask_id) is not int or not 0 <= mask_id < target.vocab_size:
        raise ConfigError(
            f"{key} of {files.model} is {mask_id!r}, must be an id of the target's vocabulary of {target.vocab_size}",
            param="model",
        )
    read = eagle3_of(files, tensors, target)
    taps = len(read.facts.taps)
    if hidden.numel() != taps * target.width:
        raise ConfigError(
            f"mask_hidden of {files.model} is {list(hidden.shape)}, and {taps} hidden states of {target.model} are "
            f"{taps} x {target.width} = {taps * target.width}; give the target that it was made for",
            param="target_model",
        )
    feature = read.opening.exact(hidden.view(1, taps, target.width))[0]  # [d]
    undecided = tuple(name for name in read.undecided if name != "carries_normed")  # nothing of it is carried
    return replace(read, undecided=undecided, mask=MaskEntry(mask_id, feature))
