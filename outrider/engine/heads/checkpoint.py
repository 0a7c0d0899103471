"""Files of a head and of its target: the configuration, and tensors by name, each read when it is asked for."""

from __future__ import annotations

import pickle
import zipfile
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.engine.loading.loader import network_class, read_config
from outrider.engine.loading.model_files import CONFIG, first_line, model_file, read_model_json
from outrider.engine.loading.tied_tables import IN_LAYER
from outrider.engine.loading.weight_headers import AGAIN, bounded_build, check_counts, read_headers, read_safe
from outrider.wire.errors import ConfigError
from outrider.wire.model_id import INDEX, SAFE, is_gguf

EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight")
PROJECTIONS = ("lm_head.weight", "embed_out.weight")
PICKLES = ("pytorch_model.bin", "medusa_lm_head.pt", "hydra_lm_head.pt")


class Checkpoint:
    """A folder or hub id with one configuration and one set of tensors."""

    def __init__(self, model: str, allow_pickle: bool = False) -> None:
        """Read config.json and find the weights.

        allow_pickle: whether a pickle (.bin, .pt) may be read where there is nothing else; torch then takes tensors
        from it alone. Raises ConfigError.
        """
        self.model = model
        self._allow_pickle = allow_pickle
        self.config = _read_config(model)
        self._shards = {name: header.path for name, header in read_headers(model).items()}
        pickles = () if self._shards else PICKLES
        self.pickle = next((path for name in pickles if (path := model_file(model, name)) is not None), None)
        """The pickle that holds the weights, where no other file does."""

    @property
    def is_wrapped(self) -> bool:
        """Whether the layout is speculators'."""
        return "speculators_model_type" in self.config

    def refusal(self, what: str, *, of: str = "", param: str = "model") -> ConfigError:
        """Return the error of files that cannot be served. of: the tensor or the key that `what` is said of."""
        return ConfigError(f"{f'{of} of ' * bool(of)}{self.model} {what}", param=param)

    def part(self, name: str) -> dict[str, Any]:
        """Return what the configuration has under a name; empty where that is no object."""
        found = self.config.get(name)
        return found if isinstance(found, dict) else {}

    @property
    def names(self) -> frozenset[str]:
        """Names of all tensors. Raises ConfigError where they are in a pickle that may not be read."""
        return frozenset(self._shards or self._pickled)

    def tensor(self, name: str) -> Tensor:
        """Return a tensor of `names`, on the CPU. Raises ConfigError for a damaged file."""
        if not self._shards:
            return self._pickled[name]
        tensor: Tensor = read_safe(self._shards[name], lambda file: file.get_tensor(name))
        return tensor

    @cached_property
    def _pickled(self) -> dict[str, Tensor]:
        if self.pickle is None:
            raise ConfigError(f"{self.model} has no weights: none of {', '.join((INDEX, *SAFE))}", param="model")
        if not self._allow_pickle:
            raise ConfigError(
                f"the weights of {self.model} are in {self.pickle.name}, a pickle, which may run code when it is read; "
                "save them as safetensors, or set allow_pickle (OUTRIDER_DRAFT_ALLOW_PICKLE=true), with which tensors "
                "alone are read from it",
                param="model",
            )
        try:
            _check_stored(self.pickle)
            found = torch.load(self.pickle, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:  # torch's own words advise to run the code
            raise ConfigError(
                f"{self.pickle} holds something else than tensors by name, or is damaged, and is not read; save the "
                "weights as safetensors where you trust the file",
                param="model",
            ) from error
        except (ConfigError, MemoryError):
            raise
        except Exception as error:  # a pickle's content decides what it raises
            raise ConfigError(f"cannot read {self.pickle}: {first_line(error)}; {AGAIN}", param="model") from error
        if not isinstance(found, dict) or not all(isinstance(tensor, Tensor) for tensor in found.values()):
            raise ConfigError(f"{self.pickle} holds something else than tensors by name", param="model")
        _check_sizes(self.pickle, found)
        return {str(name): tensor for name, tensor in found.items()}


def _read_config(model: str) -> dict[str, Any]:
    if is_gguf(model):  # the format holds models alone
        return {}
    config = read_model_json(model, CONFIG)
    if config is None:
        raise ConfigError(f"{model} has no {CONFIG}", param="model")
    check_counts(config, f"the {CONFIG} of {model}")
    return config


def _check_stored(path: Path) -> None:
    """Raise ConfigError for an archive with compressed entries: torch writes none, and a small one may unpack to
    anything.
    """
    if not zipfile.is_zipfile(path):  # torch's older format
        return
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            if entry.compress_type != zipfile.ZIP_STORED:
                raise ConfigError(f"{path} is compressed, which torch.save never does; {AGAIN}", param="model")


def _check_sizes(path: Path, tensors: dict[Any, Tensor]) -> None:
    """Raise ConfigError for a tensor of more bytes than the file has for it, such as an expanded one."""
    for name, tensor in tensors.items():
        is_plain = tensor.layout == torch.strided and tensor.device.type == "cpu" and not tensor.is_quantized
        if not is_plain or tensor.numel() * tensor.itemsize > tensor.untyped_storage().nbytes():
            raise ConfigError(
                f"{name} in {path} is {list(tensor.shape)} {tensor.dtype} of fewer numbers than that, or no plain "
                "tensor; save the weights as safetensors",
                param="model",
            )


class TargetFiles:
    """A target's folder or hub id. Its weights are opened when one of them is asked for."""

    def __init__(self, model: str) -> None:
        """Read the configuration. Raises ConfigError."""
        self.model = model
        self.config = read_config(model)
        if self.config.is_encoder_decoder:
            raise ConfigError(
                f"{model} is an encoder-decoder model, and heads are of decoder-only ones; use a draft that is a model",
                param="target_model",
            )
        text = self.config.get_text_config(decoder=True)
        self.num_layers: int = text.num_hidden_layers
        """n."""
        self.width: int = text.hidden_size
        """dt."""
        self.vocab_size: int = text.vocab_size
        """V."""
        self._is_tied = bool(self.config.tie_word_embeddings)

    @cached_property
    def _weights(self) -> Checkpoint:
        return Checkpoint(self.model)

    def embedding(self) -> Tensor:
        """Return the table [V, dt]. Raises ConfigError where the files have none as it is."""
        return self._rows(EMBEDDINGS, "embedding")

    @property
    def embedding_scale(self) -> float:
        """What the target's embedding module multiplies rows of its table by: the root of the width in Gemma."""
        with bounded_build(f"the config.json of {self.model}", len(self._weights.names)):
            embedding = network_class(self.config)(self.config).get_input_embeddings()
        scale: float = getattr(embedding, "scalar_embed_scale", getattr(embedding, "embed_scale", 1.0))
        return scale

    def projection(self) -> Tensor:
        """Return the lm_head [V, dt], which may be the embedding. Raises ConfigError as `embedding`."""
        has_own = any(_ends(name, PROJECTIONS) for name in self._weights.names)
        return self._rows(PROJECTIONS, "lm_head") if has_own or not self._is_tied else self.embedding()

    def _rows(self, endings: tuple[str, ...], what: str) -> Tensor:
        own = [name for name in sorted(self._weights.names) if not IN_LAYER.search(name)]
        found = [name for name in own if _ends(name, endings)]
        if len(found) != 1:
            raise ConfigError(
                f"the head has no {what} of its own, and {self.model} has {len(found)} tensors that may be one "
                f"({', '.join(found) or ' or '.join(endings)}); give the folder of its weights in float32 or bfloat16",
                param="target_model",
            )
        tensor = self._weights.tensor(found[0])
        fits = tensor.dim() == 2 and tensor.shape[0] >= self.vocab_size and tensor.shape[1] == self.width
        if not fits or not tensor.is_floating_point():
            raise ConfigError(
                f"{found[0]} of {self.model} is {list(tensor.shape)} {tensor.dtype}, must be "
                f"[{self.vocab_size}, {self.width}] and floating-point",
                param="target_model",
            )
        return tensor[: self.vocab_size]


def _ends(name: str, endings: tuple[str, ...]) -> bool:
    return f".{name}".endswith(tuple(f".{ending}" for ending in endings))
