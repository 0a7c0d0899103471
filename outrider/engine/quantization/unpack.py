"""Unpack a quantised checkpoint while it is read, if the device has no kernels for its packed form. Called by the
loader.

`packed_weights` finds the weights, `packed_layouts` computes them. A tensor is read when transformers needs it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from outrider.engine.files.weight_headers import read_headers
from outrider.engine.quantization.packed_weights import Headers, PackedWeight, find_packed
from outrider.wire.errors import ConfigError
from outrider.wire.peer_text import bound_text

METHODS = ("fp8", "mxfp8", "fbgemm_fp8", "compressed-tensors", "modelopt", "mxfp4", "gptq", "awq", "bitsandbytes")
"""Methods of quantisation, by their `quant_method` in config.json, whose layouts can be unpacked here."""


class PackedCheckpoint:
    """Quantised checkpoint whose weights are unpacked while they are read."""

    def __init__(self, model: str, headers: Headers, weights: dict[str, PackedWeight | None]) -> None:
        """weights: how each weight is computed, by its name in the network; None = it is stored as a plain tensor of
        this name.
        """
        self._model = model
        self._headers = headers
        self._weights = weights

    @classmethod
    def read(cls, model: str, quantization: Any) -> PackedCheckpoint:
        """Find the weights of a folder or hub id by the headers of its files. Return the checkpoint.

        quantization: the `quantization_config`, a dict as in config.json or transformers' object. Raises ConfigError
        for a layout that cannot be unpacked here.
        """
        stated = quantization
        if not isinstance(quantization, dict):
            stated = quantization.to_dict()
        headers = read_headers(model)
        return cls(model, headers, find_packed(model, headers, stated))

    @property
    def names(self) -> frozenset[str]:
        """Names of the checkpoint's weights after unpacking, which are their names in the network."""
        return frozenset(self._weights)

    def check_shapes(self, network: nn.Module) -> None:
        """Raise ConfigError if an unpacked weight has another shape than in `network`, which is on the meta device."""
        tensors = network.state_dict(keep_vars=True)
        for name, weight in self._weights.items():
            if weight is None:
                shape: tuple[int, ...] | None = self._headers[name].shape
            else:
                shape = weight.shape
            if name in tensors and shape is not None and shape != tuple(tensors[name].shape):
                raise ConfigError(
                    f"{bound_text(name)} of {self._model} is {list(shape)} when unpacked, and by its config.json must "
                    f"be {list(tensors[name].shape)}; correct it or get the files again",
                    param="model",
                )

    def state(self, dtype: torch.dtype) -> dict[str, Any]:
        """Return the `state_dict` for `from_pretrained`: by the name of each weight, an object that reads the weight
        from the files when it is indexed.

        dtype: dtype of the unpacked weights.
        """
        files = OpenFiles(self._headers)
        state: dict[str, Any] = {}
        for name, weight in self._weights.items():
            if weight is None:
                state[name] = files.slice(name)
            else:
                state[name] = UnpackedTensor(weight, files, dtype)
        return state


class UnpackedTensor:
    """One weight of a `state_dict` that is not in memory yet. Indexing it with `[...]` reads its tensors from the files
    and unpacks them; transformers indexes the tensors of safetensors files in the same way.
    """

    def __init__(self, weight: PackedWeight, files: OpenFiles, dtype: torch.dtype) -> None:
        self._weight = weight
        self._files = files
        self._dtype = dtype

    def __getitem__(self, _: object) -> Tensor:
        """Return the whole weight, whatever the index. Raises ConfigError if its tensors do not fit together."""
        weight = self._weight
        try:
            parts = {role: self._files.read(name) for role, name in weight.parts.items()}
            return weight.unpack(parts).to(self._dtype)
        except (ArithmeticError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
            why = bound_text(" ".join(str(error).split()))
            raise ConfigError(
                f"{bound_text(weight.name)} cannot be unpacked from {', '.join(sorted(weight.parts))}: {why}; get the "
                "files again",
                param="model",
            ) from error


class OpenFiles:
    """Safetensors files of a checkpoint, each opened once."""

    def __init__(self, headers: Headers) -> None:
        self._headers = headers
        self._open: dict[Path, Any] = {}

    def _file(self, name: str) -> Any:
        path = self._headers[name].path
        if path not in self._open:
            self._open[path] = safe_open(path, framework="pt")
        return self._open[path]

    def slice(self, name: str) -> Any:
        """Return an object for the tensor `name` that is read from its file when it is indexed."""
        return self._file(name).get_slice(name)

    def read(self, name: str) -> Tensor:
        """Return the tensor `name`, read from its file."""
        found: Tensor = self._file(name).get_tensor(name)
        return found
