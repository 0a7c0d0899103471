"""Read the context length for which a model was trained, and fix rotary frequencies that would depend on a batch's
length.

Called by the loaders of models, heads and vocabularies, by `outrider doctor` and training.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from outrider.wire.errors import ConfigError
from outrider.wire.telemetry.log import get_logger

log = get_logger(__name__)

MIN_CONTEXT = 16
"""Smallest context limit that is accepted, in tokens: the length that the self-test needs."""
DEFAULT_CONTEXT = 2048
"""Context limit, in tokens, of a model that states none (ALiBi)."""
MAX_CONTEXT = 1 << 24
"""Largest context limit that is accepted, in tokens. The longest published context is 10 million, Llama 4 Scout's."""
STRETCHING = ("linear", "yarn", "longrope")
"""Types of rope scaling with which the context length is the length before scaling times the scaling's factor. Llama
3's type also has a factor and is not in the list: its files state the trained context length, which may be shorter than
that product (Llama 3.2)."""
DYNAMIC = "dynamic"
"""Type of rope scaling whose rotary frequencies differ for each sequence length above the context length that the
configuration states."""


@dataclass(frozen=True, slots=True)
class StatedContext:
    """Context length that a configuration states, and the context length that follows from it and the rope scaling."""

    stated: int | None
    """Context length in tokens that the model's configuration states. In the files of some models this number already
    includes the rope scaling. None if the configuration states no length."""
    stretched: int | None
    """Context length in tokens with the rope scaling applied; equal to `stated` if the model has no rope scaling, and
    None if `stated` is None."""
    scaling: str
    """Description of the rope scaling, for messages; empty if there is none."""
    is_dynamic: bool
    """Whether the rope scaling is of the type dynamic."""


def context_limit_of(config: PreTrainedConfig, setting: int | None) -> int:
    """Return the context limit in tokens: `setting` or, if it is None, the context length for which the model was
    trained.

    Rope scaling by a factor (linear, YaRN, LongRoPE) lengthens the trained context. Rope scaling of the type dynamic
    does not: for each sequence length above the stated one it has other rotary frequencies, and keys that were cached
    at a smaller length would keep the old ones. Raises ConfigError for a setting larger than the model's context, and
    for a context limit outside MIN_CONTEXT to MAX_CONTEXT.
    """
    context = stated_context(config)
    limit = setting or context.stretched or DEFAULT_CONTEXT
    if limit > MAX_CONTEXT:
        raise ConfigError(
            f"the context is {limit} tokens (of context_limit, else of the config.json of {config.name_or_path}), and "
            f"at most {MAX_CONTEXT} are served; set context_limit",
            param="context_limit",
        )
    if context.stretched is not None and limit > context.stretched:
        raise ConfigError(
            f"context_limit is {limit}, the model was made for {context.stretched}{_reason(context)}",
            param="context_limit",
        )
    if limit < MIN_CONTEXT:
        raise ConfigError(f"context_limit is {limit}, must be at least {MIN_CONTEXT}", param="context_limit")
    return limit


def _reason(context: StatedContext) -> str:
    if not context.scaling:
        return ""
    reason = f" (max_position_embeddings {context.stated}, rope scaling {context.scaling})"
    if context.is_dynamic:
        reason += ": past that its frequencies change with every token, and cached keys would keep the old ones"
    return reason


def stated_context(config: PreTrainedConfig) -> StatedContext:
    """Return the context length that a configuration states, and the one that follows from it and the rope scaling.

    If layer types have scalings of their own, the smallest of the resulting lengths is used: Gemma 3's files state a
    length that already includes the scaling of its full-attention layers.
    """
    text = config.get_text_config(decoder=True)
    stated = _stated_length(text)
    if stated is None:
        return StatedContext(None, None, "", is_dynamic=False)
    stretched_lengths: list[int] = []
    words: dict[str, None] = {}  # a set in order
    is_dynamic = False
    for scaling in _scalings(text):
        stretched_lengths.append(_stretched(stated, scaling))
        factor = _factor(scaling)
        if factor is not None:
            words[f"{_kind(scaling)} by {factor:g}"] = None
        is_dynamic = is_dynamic or _kind(scaling) == DYNAMIC
    return StatedContext(stated, min(stretched_lengths, default=stated), " and ".join(words), is_dynamic)


def _stated_length(text: PreTrainedConfig) -> int | None:
    for name in ("max_position_embeddings", "max_seq_len", "seq_length"):
        length = getattr(text, name, None)
        if isinstance(length, int) and length > 0:
            return length
    return None


def _scalings(text: PreTrainedConfig) -> list[Mapping[str, Any]]:
    # The rope parameters of the model, or of each of its layer types: {"rope_type": ..} or {"full_attention": {..}, ..}
    parameters = getattr(text, "rope_parameters", None)
    if not isinstance(parameters, Mapping) or not parameters:
        return []
    nested: list[Mapping[str, Any]] = []
    for value in parameters.values():
        if isinstance(value, Mapping) and "rope_type" in value:
            nested.append(value)
    return nested or [parameters]


def _kind(scaling: Mapping[str, Any]) -> str:
    return str(scaling.get("rope_type", "default"))


def _factor(scaling: Mapping[str, Any]) -> float | None:
    # None where there is no factor that stretches.
    factor = scaling.get("factor")
    if isinstance(factor, bool) or not isinstance(factor, int | float):
        return None
    if not 1 < factor <= MAX_CONTEXT:
        return None
    return float(factor)


def _stretched(stated: int, scaling: Mapping[str, Any]) -> int:
    """Return the stated context as a scaling stretches it; files may state the stretched one already.

    Qwen 3's files state 40,960 and an original 32,768, by 4: 131,072. DeepSeek V3's state 163,840 and 4,096, by 40.
    """
    factor = _factor(scaling)
    unscaled = stated
    original = scaling.get("original_max_position_embeddings")
    if isinstance(original, int) and original > 0:
        unscaled = original
    if factor is None or _kind(scaling) not in STRETCHING or not unscaled <= stated <= MAX_CONTEXT:
        return stated
    return max(stated, int(unscaled * factor))


def settle_rope(model: PreTrainedModel, context_limit: int) -> None:
    """Make every position below `context_limit` use the same set of rotary frequencies, in place.

    LongRoPE (Phi 3 and similar models) has two sets. Transformers uses the long set if the longest sequence of a batch
    is longer than in pretraining. A short sequence would then depend on the others in its batch, and keys cached under
    one set would be read with the other. So a model with a limit above that length uses the long set for all sequences.
    """
    is_changed = False
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if kinds is None or not hasattr(module, "config"):
            continue
        if not isinstance(kinds, dict):
            kinds = {None: kinds}
        for layer_type, kind in kinds.items():  # None: all layers share the frequencies
            if _needs_long_factors(module, layer_type, kind, context_limit):
                _set_long_factors(module, layer_type, kind)
                is_changed = True
    if is_changed:
        log.info("%s is served past its length of pretraining: long rotary factors for all", type(model).__name__)


def _rope_parameters(module: Any, layer_type: str | None) -> Any:
    parameters = module.config.rope_parameters
    if layer_type is not None:
        parameters = parameters[layer_type]
    return parameters


def _needs_long_factors(module: Any, layer_type: str | None, kind: str, context_limit: int) -> bool:
    original = _rope_parameters(module, layer_type).get("original_max_position_embeddings")
    return kind == "longrope" and original is not None and context_limit > original


def _set_long_factors(module: Any, layer_type: str | None, kind: str) -> None:
    original = _rope_parameters(module, layer_type)["original_max_position_embeddings"]
    prefix = ""
    if layer_type is not None:
        prefix = f"{layer_type}_"
    inv_freq = getattr(module, f"{prefix}inv_freq")
    long, _ = ROPE_INIT_FUNCTIONS[kind](module.config, inv_freq.device, seq_len=original + 1, layer_type=layer_type)
    inv_freq.copy_(long)
    setattr(module, f"{prefix}original_inv_freq", inv_freq.clone())  # transformers takes it for short batches
