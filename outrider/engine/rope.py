"""Rotary positions that do not depend on who else is in a forward. Called by the loader, once the weights are there.

LongRoPE (Phi 3 and its like) has two sets of frequencies, and transformers takes the long one when the longest sequence
of a batch is past the length of pretraining. A short sequence would then change with its neighbours, and keys cached
under one set would be read with the other. So a model that is served past that length takes the long set for all.
"""

from __future__ import annotations

from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from outrider.wire.log import get_logger

log = get_logger(__name__)


def settle_rope(model: PreTrainedModel, context_limit: int) -> None:
    """One set of frequencies for every position below context_limit."""
    settled = False
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if kinds is None or not hasattr(module, "config"):
            continue
        for layer_type, kind in kinds.items() if isinstance(kinds, dict) else [(None, kinds)]:
            parameters = module.config.rope_parameters
            parameters = parameters if layer_type is None else parameters[layer_type]
            original = parameters.get("original_max_position_embeddings")
            if kind == "longrope" and original is not None and context_limit > original:
                prefix = "" if layer_type is None else f"{layer_type}_"
                inv_freq = getattr(module, f"{prefix}inv_freq")
                long, _ = ROPE_INIT_FUNCTIONS[kind](
                    module.config, inv_freq.device, seq_len=original + 1, layer_type=layer_type
                )
                inv_freq.copy_(long)
                setattr(module, f"{prefix}original_inv_freq", inv_freq.clone())  # what short batches would go back to
                settled = True
    if settled:
        log.info("%s is served past its length of pretraining: long rotary factors for all", type(model).__name__)
