"""Read how many tokens a model was made for, and settle rotary frequencies that would change with a batch's length.

Called by the loader, the heads' loader, tables of a model's tokens, `outrider doctor` and training.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from outrider.wire.errors import ConfigError
from outrider.wire.telemetry.log import get_logger

log = get_logger(__name__)

MIN_CONTEXT = 16
"""Tokens that the self-test needs."""
DEFAULT_CONTEXT = 2048
"""Tokens of the context of a model that states no limit (ALiBi)."""
MAX_CONTEXT = 1 << 24
"""Tokens of a context. The longest published is 10 million, Llama 4 Scout's."""
STRETCHING = ("linear", "yarn", "longrope")
"""Kinds of rope scaling that hold for every position up to the unscaled length times the factor. Llama 3's kind has a
factor too, but its files state the length that was trained, which for Llama 3.2 is shorter than that product."""
DYNAMIC = "dynamic"
"""Rope scaling whose frequencies are computed anew for each length past the stated one."""


@dataclass(frozen=True, slots=True)
class StatedContext:
    """The context of a configuration, in tokens."""

    stated: int | None
    """As the file has it; None where it names no length."""
    stretched: int | None
    """With the rope scaling."""
    scaling: str
    """The scaling in words; empty without one."""
    is_dynamic: bool


def context_limit_of(config: PreTrainedConfig, wanted: int | None) -> int:
    """Return `wanted`, or the tokens that the model was made for. Raises ConfigError when `wanted` does not fit.

    A linear or YaRN scaling gives the stretched length. One of kind dynamic gives the stated length: past it the
    frequencies of all tokens change with each one that is added, and the cached keys would keep those of before.
    """
    context = stated_context(config)
    limit = wanted or context.stretched or DEFAULT_CONTEXT
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
    """Return how the length came about, for an error."""
    if not context.scaling:
        return ""
    reason = f" (max_position_embeddings {context.stated}, rope scaling {context.scaling})"
    if context.is_dynamic:
        reason += ": past that its frequencies change with every token, and cached keys would keep the old ones"
    return reason


def stated_context(config: PreTrainedConfig) -> StatedContext:
    """Return the context of a configuration and what its rope scaling makes of it.

    Where layer types have scalings of their own, only what all of them share stretches the context: Gemma 3's files
    state the length to which the scaling of its full layers has stretched it already.
    """
    text = config.get_text_config(decoder=True)
    names = ("max_position_embeddings", "max_seq_len", "seq_length")
    lengths = [getattr(text, name, None) for name in names]
    stated = next((length for length in lengths if isinstance(length, int) and length > 0), None)
    if stated is None:
        return StatedContext(None, None, "", is_dynamic=False)
    scalings = list(_scalings(text))
    words = dict.fromkeys(_in_words(scaling) for scaling in scalings if _factor(scaling) is not None)
    stretched = min((_stretched(stated, scaling) for scaling in scalings), default=stated)
    is_dynamic = any(_kind(scaling) == DYNAMIC for scaling in scalings)
    return StatedContext(stated, stretched, " and ".join(words), is_dynamic)


def _scalings(text: PreTrainedConfig) -> Iterator[Mapping[str, Any]]:
    """Yield the rope parameters of the model, or of each of its layer types."""
    parameters = getattr(text, "rope_parameters", None)
    if not isinstance(parameters, Mapping) or not parameters:
        return
    nested = [each for each in parameters.values() if isinstance(each, Mapping) and "rope_type" in each]
    yield from nested or [parameters]


def _kind(scaling: Mapping[str, Any]) -> str:
    return str(scaling.get("rope_type", "default"))


def _factor(scaling: Mapping[str, Any]) -> float | None:
    """Return the factor; None where there is none that stretches."""
    factor = scaling.get("factor")
    if isinstance(factor, bool) or not isinstance(factor, int | float):
        return None
    return float(factor) if 1 < factor <= MAX_CONTEXT else None


def _in_words(scaling: Mapping[str, Any]) -> str:
    return f"{_kind(scaling)} by {_factor(scaling):g}"


def _stretched(stated: int, scaling: Mapping[str, Any]) -> int:
    """Return the context that a scaling makes of the stated one, which may be the stretched one already.

    Qwen 3's files state 40,960 and an original 32,768, by 4: 131,072. DeepSeek V3's state 163,840 and 4,096, by 40.
    """
    factor = _factor(scaling)
    original = scaling.get("original_max_position_embeddings")
    unscaled = original if isinstance(original, int) and original > 0 else stated
    if factor is None or _kind(scaling) not in STRETCHING or not unscaled <= stated <= MAX_CONTEXT:
        return stated
    return max(stated, int(unscaled * factor))


def settle_rope(model: PreTrainedModel, context_limit: int) -> None:
    """Give the model one set of rotary frequencies for every position below context_limit.

    LongRoPE (Phi 3 and its like) has two, and transformers takes the long one when the longest sequence of a batch is
    past the length of pretraining. A short sequence would then change with its neighbours, and keys cached under one
    set would be read with the other. So a model that is served past that length takes the long set for all.
    """
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
                setattr(module, f"{prefix}original_inv_freq", inv_freq.clone())  # short batches would go back to it
                settled = True
    if settled:
        log.info("%s is served past its length of pretraining: long rotary factors for all", type(model).__name__)
