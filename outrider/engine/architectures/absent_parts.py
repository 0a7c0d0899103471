"""Leave out the parts of a multimodal network that never run for text: towers and projectors. Called by `text_part`.

Which parts these are follows from the network itself, built on the meta device: for text run the decoder, the
embedding, the lm_head, and the modules that contain them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModel, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

from outrider.wire.errors import ConfigError

UNREAD_PARTS = {"Phi4MultimodalFeatureEmbedding": ("image_embed", "audio_embed")}
"""Names of submodules that never run for text, by the class of the module that contains them. That module itself does
run for text."""
READ_PARTS = {"Gemma3nModel": ("embed_vision", "embed_audio")}
"""Names of submodules outside the decoder that do run for text, because they embed special token ids. By the class of
the module that contains them."""


class AbsentPart(nn.Module):
    """Placeholder module for a part of a model that is not loaded, such as an image encoder. It has a device and a
    dtype, since some model classes read those of the absent part even when they run on text.
    """

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("nothing", torch.empty(0), persistent=False)

    @property
    def device(self) -> torch.device:
        """Device of the placeholder, which is that of the model."""
        return self.nothing.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the placeholder, which is that of the model."""
        return self.nothing.dtype

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Raise NotImplementedError: a part that is left out cannot run."""
        raise NotImplementedError("only the text part of this model is loaded")


@functools.cache
def stand_in_for_timm() -> None:
    """Register, in this process, an empty class in place of the image encoders of the timm library. A network that
    contains one can then be built without timm, and nothing is downloaded that its configuration names. `leave_out`
    replaces the empty encoders afterwards.
    """
    for model_type, class_name in MODEL_MAPPING_NAMES.items():
        if class_name == "TimmWrapperModel":
            config_class = CONFIG_MAPPING[model_type]
            attributes = {
                "config_class": config_class,
                "config": None,
                "_supports_sdpa": True,
                "_supports_flash_attn": True,
                "_supports_attention_backend": True,
            }
            tower = type("AbsentTower", (PreTrainedModel,), attributes)
            AutoModel.register(config_class, tower, exist_ok=True)


def leave_out(network: PreTrainedModel) -> list[str]:
    """Replace the modules that never run for text by `AbsentPart`, in place. Return the names of the replaced modules.

    The decoder, the embedding, the lm_head, and the modules that contain them run for text and stay. Raises ConfigError
    for a network without an lm_head.
    """
    head = network.get_output_embeddings() or _decoder_head(network)
    decoder = network.get_decoder()
    if head is None:
        raise ConfigError(
            f"{type(network).__name__} has no head that gives logits of text, so it has no text part to serve; use a "
            "model of text",
            param="model",
        )
    used = {id(decoder), id(head), id(network.get_input_embeddings())}
    prefix = next(name for name, module in network.named_modules() if module is decoder)
    if prefix:
        prefix += "."
    names = [*_unused_modules(network, "", used), *_decoder_towers(decoder, prefix, type(decoder.config))]
    for name in names:
        parent, _, child = name.rpartition(".")
        setattr(network.get_submodule(parent), child, AbsentPart())
    return names


def _decoder_head(network: PreTrainedModel) -> nn.Module | None:
    # Of a decoder that is a causal language model itself.
    decoder = network.get_decoder()
    if not isinstance(decoder, PreTrainedModel):
        return None
    return decoder.get_output_embeddings()


def _unused_modules(module: nn.Module, prefix: str, used: set[int]) -> Iterator[str]:
    """Yield the names of modules with weights that neither are in `used`, a set of ids, nor contain one of those.

    A wrapper's own parameters are kept: a class initialises them by name, and each is a vector.
    """
    if id(module) in used:
        return
    read = READ_PARTS.get(type(module).__name__, ())
    for name, child in module.named_children():
        if name in read:
            continue
        if any(id(inner) in used for inner in child.modules()):
            yield from _unused_modules(child, f"{prefix}{name}.", used)
        elif next(child.parameters(), None) is not None:
            yield f"{prefix}{name}"


def _decoder_towers(module: nn.Module, prefix: str, own: type[PreTrainedConfig]) -> Iterator[str]:
    # The names of models inside a decoder whose configuration is of another class than the decoder's own.
    unread = UNREAD_PARTS.get(type(module).__name__, ())
    for name, child in module.named_children():
        is_tower = isinstance(child, PreTrainedModel) and type(child.config) is not own
        if is_tower or name in unread:
            yield f"{prefix}{name}"
        else:
            yield from _decoder_towers(child, f"{prefix}{name}.", own)
