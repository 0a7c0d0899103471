"""Files of a head or a target: the configuration, and tensors by name, each read when it is asked for."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from outrider.engine.loading.model_files import first_line, model_file
from outrider.wire.errors import ConfigError
from outrider.wire.model_id import INDEX, SAFE

T = TypeVar("T")

AGAIN = "get the file again (where it is a pointer of Git LFS: git lfs pull)"
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
        self.config = _read_json(model, "config.json")
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
        tensor: Tensor = _read_safe(self._shards[name], lambda file: file.get_tensor(name))
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
            found = torch.load(self.pickle, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:  # torch's own words advise to run the code
            raise ConfigError(
                f"{self.pickle} holds something else than tensors by name, or is damaged, and is not read; save the "
                "weights as safetensors where you trust the file",
                param="model",
            ) from error
        except (RuntimeError, OSError, EOFError, ValueError, KeyError) as error:
            raise ConfigError(f"cannot read {self.pickle}: {first_line(error)}; {AGAIN}", param="model") from error
        if not isinstance(found, dict) or not all(isinstance(tensor, Tensor) for tensor in found.values()):
            raise ConfigError(f"{self.pickle} holds something else than tensors by name", param="model")
        return {str(name): tensor for name, tensor in found.items()}


def _read_json(model: str, name: str) -> dict[str, Any]:
    path = model_file(model, name)
    if path is None:
        raise ConfigError(f"{model} has no {name}", param="model")
    try:
        read = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {first_line(error)}", param="model") from error
    if not isinstance(read, dict):
        raise ConfigError(f"{path} is no JSON object", param="model")
    return read


def _shards(model: str) -> dict[str, Path]:
    """Return the safetensors file of each tensor; empty where there is none."""
    if model_file(model, INDEX) is not None:
        weight_map = _read_json(model, INDEX).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ConfigError(f"{INDEX} of {model} is not an index of weights; save the model again", param="model")
        paths = {name: model_file(model, str(name)) for name in set(weight_map.values())}
        for name, path in paths.items():
            if path is None:
                raise ConfigError(f"{model} has no {name} (a part of the weights that the index names)", param="model")
        return {tensor: path for tensor, name in weight_map.items() if (path := paths[name]) is not None}
    for name in SAFE:
        path = model_file(model, name)
        if path is not None:
            return dict.fromkeys(_read_safe(path, lambda file: list(file.keys())), path)
    return {}


def _read_safe(path: Path, read: Callable[[Any], T]) -> T:
    try:
        with safe_open(path, framework="pt") as file:
            return read(file)
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"cannot read {path}: {first_line(error)}; {AGAIN}", param="model") from error
