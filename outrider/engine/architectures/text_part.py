"""Build the text part of a multimodal checkpoint: transformers' own class, without what reads images, video or sound.

A wrapper keeps a decoder, its embedding and its head; the rest of it (towers, projectors) never runs for text. Where
they lie is read from the class itself, on the meta device. What is left out is never allocated, and its tensors are
not read from the files. Called by the loader.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    AutoModelForSeq2SeqLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

from outrider.engine.files.model_files import first_line
from outrider.wire.errors import ConfigError
from outrider.wire.peer_text import bound_text
from outrider.wire.telemetry.log import get_logger

log = get_logger(__name__)

UNREAD_PARTS = {"Phi4MultimodalFeatureEmbedding": ("image_embed", "audio_embed")}
"""Children that text never runs, of modules that it does run: the module's class and their names."""
READ_PARTS = {"Gemma3nModel": ("embed_vision", "embed_audio")}
"""Children beside the decoder that text runs, for the special ids that they embed: as UNREAD_PARTS."""
UNIMPLEMENTED = "_forward_unimplemented"
"""Name of torch's forward of a class that has none."""
NUM_COMPARED = 24
"""Ids at equal distances for which a plain class must give the wrapper's logits."""
MAX_COMPARED = 256
"""Ids of that comparison, a prompt that every model takes."""


@dataclass(frozen=True, slots=True)
class ServedClass:
    """The class that a configuration is served by."""

    model_class: Any
    """Built from the whole configuration."""
    is_text_part: bool
    """Whether it also reads images, video or sound, of which only its text part is served."""


def part_that_writes(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the configuration of the part that writes, of a model that only holds several together (Qwen's Omni: a
    thinker, a talker and a voice), and any other as it is.
    """
    model_class = _multimodal_class(config)
    if model_class is None or model_class.forward.__name__ != UNIMPLEMENTED:
        return config
    parts = [getattr(config, name, None) for name in config.sub_configs]
    for part in parts:
        part_class = None if part is None else _multimodal_class(part)
        if part_class is not None:
            part.name_or_path, part.architectures = config.name_or_path, [part_class.__name__]
            if getattr(config, "quantization_config", None) is not None:
                part.quantization_config = config.quantization_config
            return part
    return config


def whole_class(config: PreTrainedConfig) -> Any:
    """Return transformers' own class of a configuration that is served, with all of its parts."""
    plain = _plain_class(config)
    return plain if plain is not None and config.is_encoder_decoder else _multimodal_class(config) or plain


def served_class(config: PreTrainedConfig) -> ServedClass:
    """Return the class that a configuration is served by, from the configuration alone.

    Raises ConfigError for one that has no class which writes text, or none that does so from text alone.
    """
    name = bound_text((config.architectures or [type(config).__name__])[0])
    multimodal, plain = _multimodal_class(config), _plain_class(config)
    if plain is not None and (multimodal is None or config.is_encoder_decoder):
        why = _not_alone(config, plain)
        if why is not None:
            raise ConfigError(f"{name} {why}; use a model of text", param="model")
        return ServedClass(plain, False)
    if multimodal is None:
        kind = "encoder-decoder model of text" if config.is_encoder_decoder else "causal language model"
        raise ConfigError(f"{name} is no {kind} of transformers {transformers.__version__}", param="model")
    why = _no_text_part(config, multimodal)
    if why is not None:
        raise ConfigError(f"{name} {why}, so it has no text part to serve; use a model of text", param="model")
    if config.get_text_config(decoder=True) is config and not config.sub_configs:
        return ServedClass(multimodal, False)
    return ServedClass(_text_part_of(multimodal), True)


def _not_alone(config: PreTrainedConfig, model_class: Any) -> str | None:
    """Return why a causal language model writes nothing by itself, to follow its name; None where it does."""
    inputs = inspect.signature(model_class.forward).parameters
    if "shared_kv_states" in inputs:
        return "drafts for another model, whose keys and values it reads (shared_kv_states), and writes nothing alone"
    if "encoder_outputs" in inputs and not config.is_encoder_decoder:
        return "is the decoder of another model, and writes nothing without encoder_outputs"
    return None


def _no_text_part(config: PreTrainedConfig, model_class: Any) -> str | None:
    """Return why a multimodal class does not go on with text alone, to follow its name; None where it may."""
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
    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    return auto._model_mapping.get(type(config), None)


def _multimodal_class(config: PreTrainedConfig) -> Any:
    """Return transformers' class of the configuration that reads more than text; None where there is none."""
    autos: list[Any] = [AutoModelForImageTextToText, AutoModelForMultimodalLM]
    if not config.is_encoder_decoder:  # models that hear are listed with those that translate
        autos.append(AutoModelForSeq2SeqLM)
    for auto in autos:
        found = auto._model_mapping.get(type(config), None)
        if found is not None:
            return found
    return None


def _required_input(model_class: Any) -> str | None:
    """Return the first input of a forward, beside the ids, that has no default."""
    parameters = list(inspect.signature(model_class.forward).parameters.values())[1:]
    for parameter in parameters:
        takes_all = parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        if parameter.default is parameter.empty and not takes_all and parameter.name != "input_ids":
            return parameter.name
    return None


def attention_of_text(config: PreTrainedConfig, name: str) -> str | dict[str, str]:
    """Return `attn_implementation` so that a text part takes the attention of this name: not every tower has it."""
    text = config.get_text_config(decoder=True)
    if text is config or config.is_encoder_decoder:
        return name
    return {"": name} | {each: name for each in config.sub_configs if getattr(config, each, None) is text}


@functools.cache
def _text_part_of(model_class: Any) -> Any:
    """Return a class of the same name whose networks are built without what text never runs."""

    def build(self: PreTrainedModel, config: PreTrainedConfig, *args: Any, **kwargs: Any) -> None:
        stand_in_for_timm()
        model_class.__init__(self, config, *args, **kwargs)
        leave_out(self)

    return type(model_class.__name__, (model_class,), {"__init__": build, "__module__": model_class.__module__})


class AbsentPart(nn.Module):
    """Takes the place of a part that is left out: some classes read its device also when there is no image."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("nothing", torch.empty(0), persistent=False)

    @property
    def device(self) -> torch.device:
        return self.nothing.device

    @property
    def dtype(self) -> torch.dtype:
        return self.nothing.dtype

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("only the text part of this model is loaded")


@functools.cache
def stand_in_for_timm() -> None:
    """Have towers of the timm library built as nothing, in this process: they are left out again at once. The library
    may be missing, and it fetches what a configuration names from a hub.
    """
    for model_type, class_name in MODEL_MAPPING_NAMES.items():
        if class_name == "TimmWrapperModel":
            config_class = CONFIG_MAPPING[model_type]
            allowed = {"_supports_sdpa": True, "_supports_flash_attn": True, "_supports_attention_backend": True}
            tower = type("AbsentTower", (PreTrainedModel,), {"config_class": config_class, "config": None, **allowed})
            AutoModel.register(config_class, tower, exist_ok=True)


def leave_out(network: PreTrainedModel) -> list[str]:
    """Replace the modules that text never runs; return their names.

    Text runs the decoder, the embedding, the head, and the modules that they lie in. Raises ConfigError for a network
    without a head.
    """
    head, decoder = network.get_output_embeddings() or _own_head(network), network.get_decoder()
    if head is None:
        raise ConfigError(
            f"{type(network).__name__} has no head that gives logits of text, so it has no text part to serve; use a "
            "model of text",
            param="model",
        )
    used = {id(decoder), id(head), id(network.get_input_embeddings())}
    prefix = next(name for name, each in network.named_modules() if each is decoder)
    names = [*_beside(network, "", used), *_within(decoder, f"{prefix}." if prefix else "", type(decoder.config))]
    for name in names:
        parent, _, child = name.rpartition(".")
        setattr(network.get_submodule(parent), child, AbsentPart())
    return names


def _own_head(network: PreTrainedModel) -> nn.Module | None:
    """Return the head of a decoder that is a causal language model itself."""
    decoder = network.get_decoder()
    return decoder.get_output_embeddings() if isinstance(decoder, PreTrainedModel) else None


def _beside(module: nn.Module, prefix: str, used: set[int]) -> Iterator[str]:
    """Yield the modules with weights that neither are in use nor hold one that is. Parameters of a wrapper's own are
    kept: a class initialises them by name, and they are a vector each.
    """
    if id(module) in used:
        return
    read = READ_PARTS.get(type(module).__name__, ())
    for name, child in module.named_children():
        if name in read:
            continue
        if any(id(inner) in used for inner in child.modules()):
            yield from _beside(child, f"{prefix}{name}.", used)
        elif any(True for _ in child.parameters()):
            yield f"{prefix}{name}"


def _within(module: nn.Module, prefix: str, own: type[PreTrainedConfig]) -> Iterator[str]:
    """Yield the towers inside a decoder: models of another configuration than its `own`."""
    unread = UNREAD_PARTS.get(type(module).__name__, ())
    for name, child in module.named_children():
        is_tower = isinstance(child, PreTrainedModel) and type(child.config) is not own
        if is_tower or name in unread:
            yield f"{prefix}{name}"
        else:
            yield from _within(child, f"{prefix}{name}.", own)


@torch.inference_mode()
def plain_form(network: PreTrainedModel) -> PreTrainedModel:
    """Return transformers' causal language model around the text part's own modules, where it computes the same.

    The wrapper's forward stays the truth: the plain class is taken only if it gives the same logits. More paths run
    plain classes. network: loaded. Raises ConfigError for a wrapper that does not run on text alone.
    """
    decoder = network.get_decoder()
    candidate = None if decoder in (network, network.base_model) else _around(decoder, network)
    ids = torch.tensor([_ids_to_compare(network.config)], device=network.device)  # [1, T]
    try:
        own = network(input_ids=ids, use_cache=False).logits
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a class does without an image
        raised = "" if type(error) is ValueError else f"{type(error).__name__}: "  # which classes say in words
        raise ConfigError(
            f'{type(network).__name__} does not run on text alone (transformers: "{raised}{first_line(error)}"), so it '
            "has no text part to serve; use a model of text",
            param="model",
        ) from error
    if candidate is None:
        return network
    try:
        other = candidate(input_ids=ids, use_cache=False).logits
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a decoder may read what the wrapper's configuration alone has
        log.info("%s does not run by itself: %s", type(candidate).__name__, first_line(error))
        return network
    return candidate if torch.equal(own, other) else network


def _ids_to_compare(config: PreTrainedConfig) -> list[int]:
    """Return ids from all over the vocabulary, and every number in the configuration that may be a special token's:
    some wrappers have embeddings of their own for those of images.
    """
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


def _around(decoder: nn.Module, network: PreTrainedModel) -> PreTrainedModel | None:
    """Return the causal language model that has the decoder for its own; None where transformers has none."""
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
