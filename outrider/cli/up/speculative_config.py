"""Translates the value of vLLM's flag `--speculative-config` into flags of `outrider up`. For `vllm_flags.py`.

Keys and methods are those of vLLM's SpeculativeConfig.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from outrider.wire.errors import ConfigError
from outrider.wire.requests.params import MAX_DRAFT_TOKENS
from outrider.wire.settings.config import GatewayConfig

_DEFAULT_MAX = GatewayConfig.model_fields["max_draft_tokens"].default
OWN_DRAFTERS = {"ngram": "ngram", "ngram_gpu": "ngram", "[ngram]": "ngram", "suffix": "lookup"}
"""For each of vLLM's speculation methods that needs no model: Outrider's drafter that takes its place."""
WITH_MODEL = ("draft_model", "eagle", "eagle3", "medusa", "mtp", "dflash", "dspark")
"""vLLM's speculation methods whose `model` becomes the value of --draft. The model's configuration tells what kind of
drafter the model is."""
REFUSED_METHODS = {
    "mlp_speculator": "train a head of this target with `outrider train-head`, or name an EAGLE, Medusa or MTP head",
    "extract_hidden_states": "leave it out: `outrider train-head` takes the hidden states of the target itself",
    "custom_class": "one of the methods that are here, or `outrider train-head` for a head of your own",
}
"""For each of vLLM's speculation methods that Outrider does not have: what the user can do instead."""
_RUN_TIME = "leave it out: how a draft is run follows from its device"
_NO_EFFECT = {
    "prompt_lookup_max": "n-grams of 2 to 4 tokens are counted, the longest that was seen before decides",
    "prompt_lookup_min": "n-grams of 2 to 4 tokens are counted, the longest that was seen before decides",
    "use_heterogeneous_vocab": "a draft of another tokenizer is served without it",
    "parallel_drafting": "the draft's configuration says it",
    "suffix_decoding_max_tree_depth": "lookup copies as many tokens as a round may draft",
    "suffix_decoding_max_cached_requests": "lookup remembers 65,536 tokens of recent answers",
    "suffix_decoding_max_spec_factor": "lookup copies as many tokens as a round may draft",
    "suffix_decoding_min_token_prob": "lookup copies what followed the longest match",
    "num_speculative_tokens_per_batch_size": "-K auto, the default, chooses by what pays at each load",
    "enable_adaptive_verification": "-K auto, the default, chooses by what pays at each load",
}
"""Note that is printed for each key that is accepted but has no effect, by key."""
_REFUSED_KEYS = {
    "draft_tensor_parallel_size": "1, or leave it out: a draft is not split",
    "tensor_parallel_size": "--tensor-parallel-size, which is the target's",
    "revision": "outrider pull MODEL --revision REVISION, and that folder as model",
    "code_revision": "leave it out: no model's own code is run",
    "rejection_sample_method": "leave it out: drafts are kept by an exact rule, chosen with --acceptance",
    "draft_sample_method": "leave it out: drafts are drawn with their probabilities, which keeps more of them",
    "synthetic_acceptance_rate": "leave it out: `outrider tune` measures what the draft's own acceptance brings",
    "synthetic_acceptance_rates": "leave it out: `outrider tune` measures what the draft's own acceptance brings",
    "synthetic_acceptance_length": "leave it out: `outrider tune` measures what the draft's own acceptance brings",
    "kv_cache_dtype": "leave it out: the KV cache has the weights' dtype",
    "moe_backend": _RUN_TIME,
    "attention_backend": "--draft-attention-path",
    "enforce_eager": _RUN_TIME,
    "disable_padded_drafter_batch": _RUN_TIME,
    "disable_eagle_block_drop": _RUN_TIME,
    "use_local_argmax_reduction": _RUN_TIME,
    "disable_by_batch_size": "-K auto, the default, drafts less as the load grows",
    "acceptance_method": "--acceptance",
}
"""What the user should type instead of each key that is refused, by key."""
_HARMLESS = {
    "draft_tensor_parallel_size": (1,),
    "rejection_sample_method": ("standard", "strict", "probabilistic"),
    "draft_sample_method": ("probabilistic",),
    "enforce_eager": (False,),
    "disable_padded_drafter_batch": (False,),
    "kv_cache_dtype": ("auto",),
}
"""Values with which a refused key is accepted all the same, by key: they select what Outrider does anyway."""
_TAKEN = ("model", "method", "num_speculative_tokens", "quantization", "max_model_len")
"""Keys of a speculative config that have an effect."""


def draft_flags(config: Mapping[str, object]) -> tuple[list[str], list[str]]:
    """Translate the value of vLLM's --speculative-config. Return (flags of `outrider up`, notes to print on keys of
    `config`).

    Raises ConfigError for a key or value that is not accepted, with what to type instead.
    """
    # {"method": "ngram", "num_speculative_tokens": 4}: --no-draft --drafter ngram -K 4
    notes = list[str]()
    for key, value in config.items():
        notes += _notes_on(key, value)
    model = _text(config, "model")
    method = _text(config, "method")
    if method is None and model in OWN_DRAFTERS:
        method = model
    if method in REFUSED_METHODS:
        raise ConfigError(
            f"method {method!r} of --speculative-config is not served; instead: {REFUSED_METHODS[method]}"
        )
    flags = _drafter(model, method)
    number = config.get("num_speculative_tokens")
    if number is not None:
        flags += _lengths(number)
    for key, flag in (("quantization", "--draft-quantization"), ("max_model_len", "--draft-context-limit")):
        if config.get(key) is not None:
            flags += [flag, str(config[key])]
    return flags, notes


def _drafter(model: str | None, method: str | None) -> list[str]:
    if method in OWN_DRAFTERS:
        return ["--no-draft", "--drafter", OWN_DRAFTERS[method]]
    is_mtp = method is not None and (method == "mtp" or method.endswith("_mtp"))
    if method is not None and method not in WITH_MODEL and not is_mtp:
        known = ", ".join([*OWN_DRAFTERS, *WITH_MODEL])
        raise ConfigError(f"method of --speculative-config is {method!r}; known: {known}")
    if model is None and is_mtp:
        return ["--mtp"]
    if model is None:
        raise ConfigError(
            f"--speculative-config has no model for method {method!r}; name it, or say "
            '{"method": "ngram"}, which needs none'
        )
    return ["--draft", model]


def _lengths(number: object) -> list[str]:
    if type(number) is not int or not 0 < number <= MAX_DRAFT_TOKENS:
        raise ConfigError(
            f"num_speculative_tokens of --speculative-config is {number!r}, must be a number from 1 to "
            f"{MAX_DRAFT_TOKENS}, or left out: K is then what pays"
        )
    flags = ["-K", str(number)]
    if number > _DEFAULT_MAX:
        flags += ["--max-draft-tokens", str(number)]
    return flags


def _notes_on(key: str, value: object) -> list[str]:
    """Return a list with the note on a key, or an empty list. Raises ConfigError for a key that is not accepted."""
    if key in _TAKEN or value in _HARMLESS.get(key, ()):
        return []
    if key in _NO_EFFECT:
        return [f"{key} of --speculative-config: {_NO_EFFECT[key]}"]
    if key in _REFUSED_KEYS:
        raise ConfigError(f"{key} of --speculative-config is {value!r}, not taken here; instead: {_REFUSED_KEYS[key]}")
    known = [*_TAKEN, *_NO_EFFECT]
    close = difflib.get_close_matches(key, known, 1)
    remedy = f"taken: {', '.join(_TAKEN)}"
    if close:
        remedy = f"did you mean {close[0]}?"
    raise ConfigError(f"{key!r} is no key of --speculative-config here; {remedy}")


def _text(config: Mapping[str, object], key: str) -> str | None:
    value = config.get(key)
    if value is not None and not isinstance(value, str):
        raise ConfigError(f"{key} of --speculative-config is {value!r}, must be a text")
    return value
