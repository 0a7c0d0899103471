"""Read DFlash and DSpark heads in the layouts that people hold: z-lab's, SpecForge's, speculators', DeepSpec's.

They differ in where a key stands, in what a layer id means and in whether embedding and lm_head are the head's own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import get_args

from torch import Tensor
from transformers import PreTrainedConfig

from outrider.engine.heads.checkpoint import Checkpoint, TargetFiles
from outrider.engine.heads.dflash import DFlashConfig, DFlashHead, MarkovKind
from outrider.engine.heads.head_files import (
    HeadFiles,
    Keys,
    agreed_taps,
    complete,
    layer_config,
    layer_ids,
    llama_facts,
    read_tensors,
    take_norm,
)
from outrider.engine.heads.network import BlockShape
from outrider.engine.heads.opening import OpeningMap, OpeningSpec
from outrider.engine.loading.model_files import model_file
from outrider.engine.paths.block_cache import layer_limits
from outrider.engine.paths.forward_path import NORMED
from outrider.wire.errors import ConfigError
from outrider.wire.log import get_logger
from outrider.wire.params import MAX_DRAFT_TOKENS

log = get_logger(__name__)

ALIASES = {"encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm."}
"""Beginnings of names, and what they are elsewhere."""
CONFIDENCE = re.compile(r"confidence_head\.proj\.(weight|bias)")
"""DSpark's guess of what is accepted, by which its own engine ends blocks early."""
UNSERVED = {
    "attention_sink_bias": "attention sinks",
    "use_swa": "windows that layer_types do not name",
    "final_logit_softcapping": "soft caps",
    "input_embedding_scale": "scaled embeddings",
    "output_multiplier": "scaled logits",
}
"""Keys of a head that computes what ours does not, unless they are 0, false or a factor of 1."""


def read_dflash(files: Checkpoint, target: TargetFiles, *, is_dspark: bool) -> HeadFiles:
    """Read a head for that target. Raises ConfigError for whatever is missing, unknown or does not fit, by its name."""
    if model_file(files.model, "mask_embedding.pt") is not None:
        raise ConfigError(f"{files.model} has a mask_embedding.pt, which heads are not served with", param="model")
    tensors = read_tensors(files, _own_name)
    facts = _facts(files, tensors, target, is_dspark=is_dspark)
    for name in list(tensors):
        if is_dspark and CONFIDENCE.fullmatch(name):
            del tensors[name]
            log.info("%s has a confidence head, which is not used (%s): the target chooses K", files.model, name)
    norm, fc = take_norm(files, tensors, "hidden_norm.weight", facts.width), tensors.pop("fc.weight")
    spec = OpeningSpec(facts.taps, facts.width, epsilon=facts.epsilon, norms_output=True)
    opening = OpeningMap(spec, {"fc": fc, "output_norm": norm.to(fc.dtype)})
    complete(files, tensors, facts, target, DFlashHead, "a DSpark head" if is_dspark else "a DFlash head")
    return HeadFiles(facts, tensors, opening)


def _own_name(name: str) -> str:
    for alias, own in ALIASES.items():
        if name.startswith(alias):
            return name.replace(alias, own, 1)
    return name


def _facts(files: Checkpoint, tensors: Mapping[str, Tensor], target: TargetFiles, *, is_dspark: bool) -> DFlashConfig:
    keys = Keys(files, "dflash_config", "dspark_config")
    for key, what in UNSERVED.items():
        value = keys.get(key)
        if value and not (type(value) in (int, float) and value == 1):
            raise ConfigError(f"{key} of {files.model} is {value}, and heads are not served with {what}", param="model")
    layers = layer_config(files, has_windows=True)
    if keys.get("num_target_layers") not in (None, target.num_layers):
        raise ConfigError(
            f"num_target_layers of {files.model} is {keys.get('num_target_layers')}, and {target.model} has "
            f"{target.num_layers} layers; give the target that it was made for",
            param="target_model",
        )
    taps = _taps(files, keys, target.num_layers, layers.num_hidden_layers, is_dspark=is_dspark)
    markov_rank = 0
    if is_dspark and keys.get("markov_rank", "dspark_markov_rank") is not None:
        markov_rank = keys.number("markov_rank", "dspark_markov_rank", least=0)
    from_anchor = _from_anchor(keys, is_dspark=is_dspark)
    goes_through_module = "embed_tokens.weight" not in tensors and not files.is_wrapped  # as z-lab's blocks do
    return DFlashConfig(
        **llama_facts(files, tensors, layers, target, taps),
        windows=tuple(layer_limits(layers, index)[0] for index in range(layers.num_hidden_layers)),
        causal=_causal(keys, layers),
        block=BlockShape(
            keys.number("block_size", "dspark_block_size", least=1 if from_anchor else 2, most=MAX_DRAFT_TOKENS + 1),
            keys.number("mask_token_id", "dspark_noise_token_id", least=0, most=target.vocab_size - 1),
            from_anchor,
        ),
        has_bias=bool(getattr(layers, "attention_bias", False)),
        embedding_scale=target.embedding_scale if goes_through_module else 1.0,
        markov_rank=markov_rank,
        markov_kind=_markov_kind(files, keys),
    )


def _taps(files: Checkpoint, keys: Keys, num_layers: int, num_draft_layers: int, *, is_dspark: bool) -> tuple[int, ...]:
    """Return the hidden states that the head reads: id k means h[k] in speculators' key, and h[k + 1] in all others',
    which name a layer by its output. Without a key, those that z-lab takes for a draft of so many layers.

    What the last layer's id means, trainers do not agree on. z-lab's code, as NeMo AutoModel's, takes it of
    transformers' hidden_states, where it is normed; DeepSpec, vLLM and SGLang, and so SpecForge and speculators, take
    it before the final norm. Here a DFlash head reads it as in z-lab's code, where it is named in z-lab's key. The
    wiring test tries the other.
    """
    said = {
        "aux_hidden_state_layer_ids": layer_ids(files, files.config.get("aux_hidden_state_layer_ids"), 0),
        "target_layer_ids": layer_ids(files, keys.get("target_layer_ids", "dspark_target_layer_ids"), 1),
    }
    taps = agreed_taps(files, said, _default_taps(num_layers, num_draft_layers), num_layers)
    if is_dspark or said["aux_hidden_state_layer_ids"] is not None:
        return taps
    return tuple(NORMED if tap == num_layers else tap for tap in taps)


def _default_taps(num_layers: int, num_taps: int) -> tuple[int, ...]:
    if num_taps == 1:
        return (num_layers // 2 + 1,)
    return tuple(round(1 + i * (num_layers - 4) / (num_taps - 1)) + 1 for i in range(num_taps))


def _causal(keys: Keys, layers: PreTrainedConfig) -> tuple[bool, ...]:
    """Return by layer whether a token of the block sees no later one: those with a window do, unless a key says."""
    kinds = getattr(layers, "layer_types", None) or ["full_attention"] * layers.num_hidden_layers
    for key in ("causal", "is_causal"):
        is_causal = keys.flag(key)
        if is_causal is not None:
            return (is_causal,) * len(kinds)
    if keys.flag("sliding_window_non_causal"):
        return (False,) * len(kinds)
    return tuple(kind == "sliding_attention" for kind in kinds)


def _from_anchor(keys: Keys, *, is_dspark: bool) -> bool:
    """Return whether the anchor's place says the next token: DSpark's do, DFlash's do not, unless a key says."""
    for key, when_true in (("sample_from_anchor", True), ("dspark_bonus_anchor", False), ("shift_label", True)):
        flag = keys.flag(key)
        if flag is not None:
            return flag is when_true
    return is_dspark


def _markov_kind(files: Checkpoint, keys: Keys) -> MarkovKind:
    kind: MarkovKind = keys.get("markov_head_type") or "vanilla"
    kinds = get_args(MarkovKind)
    if kind not in kinds:
        raise ConfigError(
            f"markov_head_type of {files.model} is {kind!r}, must be one of {', '.join(kinds)}", param="model"
        )
    return kind
