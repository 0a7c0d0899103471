"""Build the text part of a multimodal checkpoint: transformers' own class without parts for images, video and sound.

Such a class is a wrapper of a decoder, its embedding and its lm_head. Its other parts (towers, projectors) never run
for text. Which parts these are is found in the class itself, on the meta device. They are never allocated, and their
tensors are not read from the files. Called by the loader.
"""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    AutoModelForSeq2SeqLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from outrider.engine.architectures.absent_parts import leave_out, stand_in_for_timm
from outrider.engine.files.model_files import first_line
from outrider.wire.errors import ConfigError
from outrider.wire.peer_text import bound_text
from outrider.wire.telemetry.log import get_logger

log = get_logger(__name__)

UNIMPLEMENTED = "_forward_unimplemented"
"""Name of the `forward` that torch gives to a module class which defines none. A class whose `forward` has this name
cannot run."""
NUM_COMPARED = 24
"""Number of equal parts into which the vocabulary is divided to choose test tokens: the ids at the bounds of the parts,
and special ids. With these ids the logits of a multimodal class are compared with the logits of the class for text
alone."""
MAX_COMPARED = 256
"""Maximum number of token ids on which a multimodal class is compared with the class for text alone. Every model
accepts a prompt of this length."""


@dataclass(frozen=True, slots=True)
class ServedClass:
    """Transformers class with which a model is served."""

    model_class: Any
    """Class that is built from the whole configuration: transformers' own or, if only the text part is served, our
    subclass of it without the other parts."""
    is_text_part: bool
    """Whether the checkpoint also reads images, video or sound, and only its text part is served."""


def text_generating_part(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the configuration of the part that generates text, if the model is only a bundle of several models. For
    other models return the configuration unchanged.

    Example: Qwen's Omni bundles a thinker, a talker and a voice, of which the thinker generates text.
    """
    model_class = _multimodal_class(config)
    if model_class is None or model_class.forward.__name__ != UNIMPLEMENTED:
        return config
    for name in config.sub_configs:
        part: PreTrainedConfig | None = getattr(config, name, None)
        if part is None:
            continue
        part_class = _multimodal_class(part)
        if part_class is not None:
            part.name_or_path = config.name_or_path
            part.architectures = [part_class.__name__]
            if getattr(config, "quantization_config", None) is not None:
                part.quantization_config = config.quantization_config
            return part
    return config


def whole_class(config: PreTrainedConfig) -> Any:
    """Return transformers' own class for a configuration, with all of its parts; None if there is none."""
    plain = _plain_class(config)
    if plain is not None and config.is_encoder_decoder:
        return plain
    return _multimodal_class(config) or plain


def served_class(config: PreTrainedConfig) -> ServedClass:
    """Return the class with which a configuration is served. Nothing but the configuration is read.

    Raises ConfigError if no class generates text, or if none does so from text alone.
    """
    name = bound_text((config.architectures or [type(config).__name__])[0])
    multimodal = _multimodal_class(config)
    plain = _plain_class(config)
    if plain is not None and (multimodal is None or config.is_encoder_decoder):
        refusal = _plain_refusal(config, plain)
        if refusal is not None:
            raise ConfigError(f"{name} {refusal}; use a model of text", param="model")
        return ServedClass(plain, False)
    if multimodal is None:
        kind = "causal language model"
        if config.is_encoder_decoder:
            kind = "encoder-decoder model of text"
        raise ConfigError(f"{name} is no {kind} of transformers {transformers.__version__}", param="model")
    refusal = _multimodal_refusal(config, multimodal)
    if refusal is not None:
        raise ConfigError(f"{name} {refusal}, so it has no text part to serve; use a model of text", param="model")
    if config.get_text_config(decoder=True) is config and not config.sub_configs:
        return ServedClass(multimodal, False)
    return ServedClass(_text_part_class(multimodal), True)


def _plain_refusal(config: PreTrainedConfig, model_class: Any) -> str | None:
    # Why a causal language model generates nothing by itself, to follow its name.
    inputs = inspect.signature(model_class.forward).parameters
    if "shared_kv_states" in inputs:
        return "drafts for another model, whose keys and values it reads (shared_kv_states), and writes nothing alone"
    if "encoder_outputs" in inputs and not config.is_encoder_decoder:
        return "is the decoder of another model, and writes nothing without encoder_outputs"
    return None


def _multimodal_refusal(config: PreTrainedConfig, model_class: Any) -> str | None:
    # Why a multimodal class generates nothing from text alone, to follow its name.
    if config.is_encoder_decoder:
        return "is an encoder-decoder model that reads images with its encoder"
    required = _required_input(model_class)
    if required is not None:
        return f"writes nothing without {required}"
    if getattr(config, "num_codebooks", None):
        return f"reads codes of audio beside each token (num_codebooks is {config.num_codebooks})"
    classifier = AutoModelForImageClassification._model_mapping.get(type(config), None)
    if classifier is not None:
        return f"classifies images ({classifier.__name__})"
    if getattr(config, "canvas_length", None):
        return "writes blocks of tokens by diffusion (canvas_length), not one after another"
    if getattr(config.get_text_config(decoder=True), "use_bidirectional_attention", None) in (True, "all"):
        return "reads its prompt in both directions (use_bidirectional_attention) and is no causal language model"
    return None


def _plain_class(config: PreTrainedConfig) -> Any:
    # The class that reads text alone; None where there is none.
    auto: Any = AutoModelForCausalLM
    if config.is_encoder_decoder:
        auto = AutoModelForSeq2SeqLM
    return auto._model_mapping.get(type(config), None)


def _multimodal_class(config: PreTrainedConfig) -> Any:
    # The class that reads more than text; None where there is none.
    autos: list[Any] = [AutoModelForImageTextToText, AutoModelForMultimodalLM]
    if not config.is_encoder_decoder:  # speech models are listed with those that translate
        autos.append(AutoModelForSeq2SeqLM)
    for auto in autos:
        found = auto._model_mapping.get(type(config), None)
        if found is not None:
            return found
    return None


def _required_input(model_class: Any) -> str | None:
    # The first parameter of a forward without a default, input_ids excepted.
    parameters = inspect.signature(model_class.forward).parameters.values()
    for parameter in list(parameters)[1:]:
        takes_all = parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        if parameter.default is parameter.empty and not takes_all and parameter.name != "input_ids":
            return parameter.name
    return None


def attention_of_text(config: PreTrainedConfig, name: str) -> str | dict[str, str]:
    """Return the value of transformers' `attn_implementation` that selects the attention `name` for the text part, and
    not for encoders of images or sound.
    """
    text = config.get_text_config(decoder=True)
    if text is config or config.is_encoder_decoder:
        return name
    names = {"": name}
    for part in config.sub_configs:
        if getattr(config, part, None) is text:
            names[part] = name
    return names


@functools.cache
def _text_part_class(model_class: Any) -> Any:
    # A subclass of the same name, whose networks are built without the parts that text never runs.

    def build(self: PreTrainedModel, config: PreTrainedConfig, *args: Any, **kwargs: Any) -> None:
        stand_in_for_timm()
        model_class.__init__(self, config, *args, **kwargs)
        leave_out(self)

    return type(model_class.__name__, (model_class,), {"__init__": build, "__module__": model_class.__module__})


@torch.inference_mode()
def plain_form(network: PreTrainedModel) -> PreTrainedModel:
    """Return transformers' causal language model for the decoder of a multimodal model, built around the same modules,
    if it computes the same logits. Otherwise return `network`.

    The causal language model is preferred since it can run on more attention paths. network: a multimodal model of
    which only the text part is loaded. Raises ConfigError if it does not run on text alone.
    """
    decoder = network.get_decoder()
    candidate: PreTrainedModel | None = None
    if decoder not in (network, network.base_model):
        candidate = _plain_around(decoder, network)
    ids = torch.tensor([_ids_to_compare(network.config)], device=network.device)  # [1, T] int64
    try:
        logits = network(input_ids=ids, use_cache=False).logits  # [1, T, V]
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a class does without an image
        kind = f"{type(error).__name__}: "
        if type(error) is ValueError:  # whose message is a sentence
            kind = ""
        raise ConfigError(
            f'{type(network).__name__} does not run on text alone (transformers: "{kind}{first_line(error)}"), so it '
            "has no text part to serve; use a model of text",
            param="model",
        ) from error
    if candidate is None:
        return network
    try:
        plain_logits = candidate(input_ids=ids, use_cache=False).logits  # [1, T, V]
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a decoder may read what the wrapper's configuration alone has
        log.info("%s does not run by itself: %s", type(candidate).__name__, first_line(error))
        return network
    if not torch.equal(logits, plain_logits):
        return network
    return candidate


def _ids_to_compare(config: PreTrainedConfig) -> list[int]:
    # Ids from all over the vocabulary, and every number of the configuration that may be a special token's id: some
    # wrappers have embeddings of their own for those of images.
    vocab_size = config.get_text_config(decoder=True).vocab_size
    ids = {index * (vocab_size - 1) // NUM_COMPARED for index in range(NUM_COMPARED + 1)}
    pending: list[Any] = [config.to_dict()]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            pending += value.values()
        elif isinstance(value, list | tuple):
            pending += value
        elif type(value) is int and 0 <= value < vocab_size:
            ids.add(value)
    return sorted(ids)[-MAX_COMPARED:]


def _plain_around(decoder: nn.Module, network: PreTrainedModel) -> PreTrainedModel | None:
    # The causal language model that contains the decoder; None where transformers has none.
    assert isinstance(decoder, PreTrainedModel)
    if decoder.get_output_embeddings() is not None:
        return decoder
    plain = AutoModelForCausalLM._model_mapping.get(type(decoder.config), None)
    if plain is None:
        return None
    with torch.device("meta"):
        candidate: PreTrainedModel = plain(decoder.config)
    if type(candidate.base_model) is not type(decoder):
        return None
    setattr(candidate, candidate.base_model_prefix, decoder)
    candidate.set_output_embeddings(network.get_output_embeddings())
    if any(tensor.is_meta for tensor in (*candidate.parameters(), *candidate.buffers())):
        return None
    return candidate.eval()
