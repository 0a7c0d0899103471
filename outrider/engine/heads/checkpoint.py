"""Files of a head or a target: the configuration, and tensors by name, each read when it is asked for."""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.engine.loading.model_files import CONFIG, first_line, model_file, read_model_json
from outrider.engine.loading.weight_headers import AGAIN, check_counts, read_headers, read_safe
from outrider.wire.errors import ConfigError
from outrider.wire.model_id import INDEX, SAFE, is_gguf

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
        self._shards = _shards(model)
        pickles = () if self._shards else PICKLES
        self.pickle = next((path for name in pickles if (path := model_file(model, name)) is not None), None)
        """The pickle that holds the weights, where no other file does."""
        self._pickled: dict[str, Tensor] | None = None

    @property
    def names(self) -> frozenset[str]:
        """Names of all tensors. Raises ConfigError where they are in a pickle that may not be read."""
        return frozenset(self._shards or self._unpickled())

    def tensor(self, name: str) -> Tensor:
        """Return a tensor of `names`, on the CPU. Raises ConfigError for a damaged file."""
        if not self._shards:
            return self._unpickled()[name]
        tensor: Tensor = read_safe(self._shards[name], lambda file: file.get_tensor(name))
        return tensor

    def _unpickled(self) -> dict[str, Tensor]:
        if self._pickled is None:
            self._pickled = self._unpickle()
        return self._pickled

    def _unpickle(self) -> dict[str, Tensor]:
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


def _shards(model: str) -> dict[str, Path]:
    """Return the safetensors file of each tensor; empty where there is none."""
    return {name: header.path for name, header in read_headers(model).items()}


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
