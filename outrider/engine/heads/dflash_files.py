"""Read DFlash and DSpark heads in the layouts that people hold: z-lab's, SpecForge's, speculators', DeepSpec's.

They differ in where a key stands, in what a layer id means and in whether embedding and lm_head are the head's own.
"""

from __future__ import annotations

import re
from typing import get_args

from transformers import PreTrainedConfig

from outrider.engine.heads.checkpoint import Checkpoint, TargetFiles
from outrider.engine.heads.dflash import DFlashConfig, DFlashHead, MarkovKind
from outrider.engine.heads.head_files import HeadFiles, HeadReader, read_tensors
from outrider.engine.heads.network import BlockShape
from outrider.engine.heads.opening import OpeningMap, OpeningSpec
from outrider.engine.loading.model_files import model_file
from outrider.engine.paths.block_cache import layer_limits
from outrider.engine.paths.forward_path import NORMED
from outrider.wire.log import get_logger
from outrider.wire.params import MAX_DRAFT_TOKENS

log = get_logger(__name__)

ALIASES = {"encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm."}
"""Beginnings of names, and what they are elsewhere."""
CONFIDENCE = re.compile(r"confidence_head\.proj\.(weight|bias)")
"""DSpark's guess of what is accepted, by which its own engine ends blocks early."""
RANK = ("markov_rank", "dspark_markov_rank")
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
        raise files.refusal("has a mask_embedding.pt, which heads are not served with")
    tensors = read_tensors(files, _own_name)
    for name in list(tensors):
        if is_dspark and CONFIDENCE.fullmatch(name):
            del tensors[name]
            log.info("%s has a confidence head, which is not used (%s): the target chooses K", files.model, name)
    reader = HeadReader(files, target, tensors, "dflash_config", "dspark_config")
    facts = _facts(reader, is_dspark=is_dspark)
    norm, fc = reader.take_norm("hidden_norm.weight", facts.width), reader.tensors.pop("fc.weight")
    spec = OpeningSpec(facts.taps, facts.width, epsilon=facts.epsilon, norms_output=True)
    opening = OpeningMap(spec, {"fc": fc, "output_norm": norm.to(fc.dtype)})
    return reader.complete(facts, DFlashHead, "a DSpark head" if is_dspark else "a DFlash head", opening)


def _own_name(name: str) -> str:
    for alias, own in ALIASES.items():
        if name.startswith(alias):
            return name.replace(alias, own, 1)
    return name


def _facts(reader: HeadReader, *, is_dspark: bool) -> DFlashConfig:
    target = reader.target
    for key, what in UNSERVED.items():
        value = reader.get(key)
        if value and not (type(value) in (int, float) and value == 1):
            raise reader.refusal(f"is {value}, and heads are not served with {what}", of=key)
    layers = reader.layers(has_windows=True)
    num_layers = layers.num_hidden_layers
    num_target_layers = reader.get("num_target_layers")
    if num_target_layers not in (None, target.num_layers):
        raise reader.refusal(
            f"is {num_target_layers}, and {target.model} has {target.num_layers} layers; give the target that it was "
            "made for",
            of="num_target_layers",
            param="target_model",
        )
    markov_rank = 0
    if is_dspark and reader.get(*RANK) is not None:
        markov_rank = reader.number(*RANK, least=0)
    markov_kind: MarkovKind = reader.get("markov_head_type") or "vanilla"
    if markov_kind not in get_args(MarkovKind):
        kinds = ", ".join(get_args(MarkovKind))
        raise reader.refusal(f"is {markov_kind!r}, must be one of {kinds}", of="markov_head_type")
    from_anchor = _from_anchor(reader, is_dspark=is_dspark)
    goes_through_module = "embed_tokens.weight" not in reader.tensors and not reader.files.is_wrapped  # as z-lab's do
    return DFlashConfig(
        **reader.llama_facts(layers, _taps(reader, num_layers, is_dspark=is_dspark)),
        windows=tuple(layer_limits(layers, index)[0] for index in range(num_layers)),
        causal=_causal(reader, layers),
        block=BlockShape(
            reader.number("block_size", "dspark_block_size", least=1 if from_anchor else 2, most=MAX_DRAFT_TOKENS + 1),
            reader.number("mask_token_id", "dspark_noise_token_id", least=0, most=target.vocab_size - 1),
            from_anchor,
        ),
        bias="all" if getattr(layers, "attention_bias", False) else "none",
        embedding_scale=target.embedding_scale if goes_through_module else 1.0,
        markov_rank=markov_rank,
        markov_kind=markov_kind,
    )


def _taps(reader: HeadReader, num_draft_layers: int, *, is_dspark: bool) -> tuple[int, ...]:
    """Return the hidden states that the head reads: id k means h[k] in speculators' key, and h[k + 1] in all others',
    which name a layer by its output. Without a key, those that z-lab takes for a draft of so many layers.

    What the last layer's id means, trainers do not agree on. z-lab's code, as NeMo AutoModel's, takes it of
    transformers' hidden_states, where it is normed; DeepSpec, vLLM and SGLang, and so SpecForge and speculators, take
    it before the final norm. Here a DFlash head reads it as in z-lab's code, where it is named in z-lab's key. The
    wiring test tries the other.
    """
    num_layers = reader.target.num_layers
    default: tuple[int, ...] = (num_layers // 2 + 1,)
    if num_draft_layers > 1:
        apart = (num_layers - 4) / (num_draft_layers - 1)
        default = tuple(round(1 + i * apart) + 1 for i in range(num_draft_layers))
    wrapped_ids = reader.config.get("aux_hidden_state_layer_ids")
    keys = {
        "aux_hidden_state_layer_ids": (wrapped_ids, 0),
        "target_layer_ids": (reader.get("target_layer_ids", "dspark_target_layer_ids"), 1),
    }
    taps = reader.taps(keys, default)
    if is_dspark or wrapped_ids:
        return taps
    return tuple(NORMED if tap == num_layers else tap for tap in taps)


def _causal(reader: HeadReader, layers: PreTrainedConfig) -> tuple[bool, ...]:
    """Return by layer whether a token of the block sees no later one: those with a window do, unless a key says."""
    kinds = getattr(layers, "layer_types", None) or ["full_attention"] * layers.num_hidden_layers
    for key in ("causal", "is_causal"):
        is_causal = reader.flag(key)
        if is_causal is not None:
            return (is_causal,) * len(kinds)
    if reader.flag("sliding_window_non_causal"):
        return (False,) * len(kinds)
    return tuple(kind == "sliding_attention" for kind in kinds)


def _from_anchor(reader: HeadReader, *, is_dspark: bool) -> bool:
    """Return whether the anchor's place says the next token: DSpark's do, DFlash's do not, unless a key says."""
    for key, when_true in (("sample_from_anchor", True), ("dspark_bonus_anchor", False), ("shift_label", True)):
        flag = reader.flag(key)
        if flag is not None:
            return flag is when_true
    return is_dspark
