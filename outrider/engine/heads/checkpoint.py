"""Files of a head and of its target: the configuration, and the weights, of which a tensor is read when it is first
needed.
"""

from __future__ import annotations

import pickle
import zipfile
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.engine.files.model_files import CONFIG, first_line, model_file, read_model_json
from outrider.engine.files.tied_tables import IN_LAYER
from outrider.engine.files.weight_headers import AGAIN, bounded_build, check_counts, read_headers, read_safe
from outrider.engine.loading.loader import network_class, read_config
from outrider.wire.errors import ConfigError
from outrider.wire.models.model_id import INDEX_FILE, SAFETENSORS_FILES, is_gguf

EMBEDDINGS = (".embed_tokens.weight", ".wte.weight", ".embed_in.weight", ".word_embeddings.weight")
"""Endings of the name of the input embedding in a target's checkpoint. A dot is put in front of each tensor name before
it is compared, so that the whole name "wte.weight" matches, too."""
LM_HEADS = (".lm_head.weight", ".embed_out.weight")
"""Endings of the name of the lm_head in a target's checkpoint. A dot is put in front of each tensor name before it is
compared, so that the whole name "lm_head.weight" matches, too."""
PICKLES = ("pytorch_model.bin", "medusa_lm_head.pt", "hydra_lm_head.pt")
"""Names of the pickle files in which a head's weights may be stored. The first that exists is used."""


class Checkpoint:
    """Checkpoint of one model or head, given as a folder or hub id: its config.json and its tensors by name."""

    def __init__(self, model: str, allow_pickle: bool = False) -> None:
        """Read config.json and find the files with the weights. Raises `ConfigError`.

        `allow_pickle`: whether a pickle (.bin, .pt) may be read if there is no safetensors or GGUF file. torch then
        reads nothing but tensors from it.
        """
        self.model = model
        self._allow_pickle = allow_pickle
        self.config: dict[str, Any] = {}
        if not is_gguf(model):  # a GGUF file holds models alone
            config = read_model_json(model, CONFIG)
            if config is None:
                raise ConfigError(f"{model} has no {CONFIG}", param="model")
            check_counts(config, f"the {CONFIG} of {model}")
            self.config = config
        self._shards = {name: header.path for name, header in read_headers(model).items()}
        self.pickle: Path | None = None
        """Path of the pickle that holds the weights; None if the weights are in safetensors or GGUF files."""
        if not self._shards:
            self.pickle = _find_pickle(model)

    @property
    def is_wrapped(self) -> bool:
        """Whether config.json and the tensor names have the layout of the speculators library."""
        return "speculators_model_type" in self.config

    def refusal(self, what: str, *, of: str = "", param: str = "model") -> ConfigError:
        """Return a `ConfigError` that says why this checkpoint is refused: "MODEL `what`" or, if `of` names the tensor
        or the key at fault, "`of` of MODEL `what`". `param`: the request or setting field that the error names.
        """
        subject = self.model
        if of:
            subject = f"{of} of {self.model}"
        return ConfigError(f"{subject} {what}", param=param)

    def part(self, name: str) -> dict[str, Any]:
        """Return the JSON object that config.json has under the key `name`; an empty dict if it has none."""
        part = self.config.get(name)
        if not isinstance(part, dict):
            return {}
        return part

    @property
    def names(self) -> frozenset[str]:
        """Names of all tensors of the checkpoint. Raises `ConfigError` if they are in a pickle that may not be read."""
        return frozenset(self._shards or self._pickled)

    def tensor(self, name: str) -> Tensor:
        """Return the tensor of this name (one of `names`), on the CPU. Raises `ConfigError` for a damaged file."""
        if not self._shards:
            return self._pickled[name]
        tensor: Tensor = read_safe(self._shards[name], lambda file: file.get_tensor(name))
        return tensor

    @cached_property
    def _pickled(self) -> dict[str, Tensor]:
        if self.pickle is None:
            raise ConfigError(
                f"{self.model} has no weights: none of {', '.join((INDEX_FILE, *SAFETENSORS_FILES))}", param="model"
            )
        if not self._allow_pickle:
            raise ConfigError(
                f"the weights of {self.model} are in {self.pickle.name}, a pickle, which may run code when it is read; "
                "save them as safetensors, or set allow_pickle (OUTRIDER_DRAFT_ALLOW_PICKLE=true), with which tensors "
                "alone are read from it",
                param="model",
            )
        try:
            _check_stored(self.pickle)
            tensors = torch.load(self.pickle, map_location="cpu", weights_only=True)
            if not isinstance(tensors, dict):
                raise pickle.UnpicklingError
            for name, tensor in tensors.items():
                _check_tensor(name, tensor)
        except pickle.UnpicklingError as error:  # torch's own message advises to run the code
            raise ConfigError(
                f"{self.pickle} holds something else than tensors by name, or is damaged, and is not read; save the "
                "weights as safetensors where you trust the file",
                param="model",
            ) from error
        except Exception as error:  # a pickle's content decides which exception is raised
            raise ConfigError(f"cannot read {self.pickle}: {first_line(error)}; {AGAIN}", param="model") from error
        return tensors


def _find_pickle(model: str) -> Path | None:
    for name in PICKLES:
        path = model_file(model, name)
        if path is not None:
            return path
    return None


def _check_stored(path: Path) -> None:
    """Raise ValueError for compressed entries: torch writes none, and a small one may unpack to any size."""
    if zipfile.is_zipfile(path):  # else it has torch's older format
        with zipfile.ZipFile(path) as archive:
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
                raise ValueError("it is compressed, which torch.save never does")


def _check_tensor(name: Any, tensor: Any) -> None:
    """Raise UnpicklingError for anything else than a tensor by its name.

    Raise ValueError for a tensor of more bytes than the file has for it, such as an expanded one.
    """
    if not isinstance(name, str) or not isinstance(tensor, Tensor):
        raise pickle.UnpicklingError
    is_plain = tensor.layout == torch.strided and tensor.device.type == "cpu" and not tensor.is_quantized
    if not is_plain or tensor.nbytes > tensor.untyped_storage().nbytes():
        raise ValueError(f"{name} in it has fewer numbers than {list(tensor.shape)} or is no plain tensor")


class TargetFiles:
    """Configuration, embedding and lm_head of a head's target, given as a folder or hub id. The weights are opened when
    the first tensor is read.
    """

    def __init__(self, model: str) -> None:
        """Read the target's configuration. Raises `ConfigError`, also for an encoder-decoder model."""
        self.model = model
        self.config = read_config(model)
        if self.config.is_encoder_decoder:
            raise ConfigError(
                f"{model} is an encoder-decoder model, and heads are of decoder-only ones; use a draft that is a model",
                param="target_model",
            )
        text = self.config.get_text_config(decoder=True)
        self.num_layers: int = text.num_hidden_layers
        """n, number of the target's decoder layers."""
        self.width: int = text.hidden_size
        """dt, width of the target's hidden states."""
        self.vocab_size: int = text.vocab_size
        """V, the target's vocabulary size."""
        self._is_tied = bool(self.config.tie_word_embeddings)

    @cached_property
    def _weights(self) -> Checkpoint:
        return Checkpoint(self.model)

    def embedding(self) -> Tensor:
        """Return the target's input embedding [V, dt]. Raises `ConfigError` if its files do not have it as one
        floating-point tensor.
        """
        return self._rows(EMBEDDINGS, "embedding")

    @property
    def embedding_scale(self) -> float:
        """Factor by which the target's embedding module multiplies the rows of the embedding: the square root of the
        width in Gemma, 1 in most models.
        """
        with bounded_build(f"the config.json of {self.model}", len(self._weights.names)):
            embedding = network_class(self.config)(self.config).get_input_embeddings()
        scale: float = getattr(embedding, "scalar_embed_scale", getattr(embedding, "embed_scale", 1.0))
        return scale

    def lm_head(self) -> Tensor:
        """Return the target's lm_head [V, dt]; with tied weights this is the embedding. Raises `ConfigError` if its
        files do not have it as one floating-point tensor.
        """
        if self._is_tied and not any(f".{name}".endswith(LM_HEADS) for name in self._weights.names):
            return self.embedding()
        return self._rows(LM_HEADS, "lm_head")

    def _rows(self, endings: tuple[str, ...], what: str) -> Tensor:
        found = list[str]()
        for name in sorted(self._weights.names):
            if f".{name}".endswith(endings) and not IN_LAYER.search(name):
                found.append(name)
        if len(found) == 1:
            tensor = self._weights.tensor(found[0])[: self.vocab_size]
            if tensor.shape == (self.vocab_size, self.width) and tensor.is_floating_point():
                return tensor
        raise ConfigError(
            f"the head has no {what} of its own, and {self.model} does not have one floating-point tensor "
            f"[{self.vocab_size}, {self.width}] for it, but {', '.join(found) or 'none'}; give the folder of its "
            "weights in float32 or bfloat16",
            param="target_model",
        )
