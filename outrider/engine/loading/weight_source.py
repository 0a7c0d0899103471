"""Find a model's weights and choose the form in which they are loaded: as stored, unpacked, or read from GGUF.

Used by the loader and by `outrider doctor`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from outrider.engine.files.gguf_files import own_dtype, read_once, reading, stored_types, weight_options
from outrider.engine.files.gguf_stated import check_tensors
from outrider.engine.files.model_files import gguf_path
from outrider.engine.files.tied_tables import check_tied_names
from outrider.engine.files.weight_headers import TensorHeader, check_sizes
from outrider.engine.quantization.quantize import (
    check_unpacked,
    method_of,
    quantization_of,
    unpack_reason,
    unpacked_config,
)
from outrider.engine.quantization.unpack import PackedCheckpoint
from outrider.wire.models.gguf_header import read_header
from outrider.wire.settings.config import WorkerConfig


@dataclass(frozen=True, slots=True)
class WeightSource:
    """Weights of one model before they are read: where they are, and whether they will be unpacked."""

    model: str
    """Folder, GGUF file or hub id of the model."""
    config: PreTrainedConfig
    """Configuration of the network to build. If the weights are unpacked, it has no `quantization_config`."""
    gguf: Path | None = None
    """Path of the GGUF file; None if the weights are safetensors."""
    packed: PackedCheckpoint | None = None
    """Quantised checkpoint to unpack at load; None if the weights are loaded as stored or from GGUF."""
    why_unpacked: str | None = None
    """Clause for the log and errors: why the weights are unpacked at load; None if they are not unpacked."""

    @classmethod
    def as_stored(cls, model: str, config: PreTrainedConfig) -> WeightSource:
        """Return the source for loading the weights of a folder, GGUF file or hub id as they are stored."""
        return cls(model, config, gguf_path(model))

    @classmethod
    def find(cls, model: str, config: PreTrainedConfig, device: torch.device, quantization: str) -> WeightSource:
        """Return the source for loading the weights of a folder, GGUF file or hub id. They will be unpacked if the
        device has no kernels for them as they are stored.

        quantization: the setting of this name. Raises ConfigError if it does not suit the weights, and if these can
        neither be run as they are stored nor be unpacked.
        """
        gguf = gguf_path(model)
        if gguf is not None:
            return cls(model, config, gguf, why_unpacked=stored_types(gguf))
        why = unpack_reason(model, config, device, quantization)
        if why is None:
            return cls(model, config)
        packed = PackedCheckpoint.read(model, quantization_of(config))
        return cls(model, unpacked_config(config), packed=packed, why_unpacked=why)

    def check(self, network: PreTrainedModel, headers: Mapping[str, TensorHeader]) -> None:
        """Raise ConfigError if the headers of the weight files contradict the network: a tensor has another shape, the
        network is far larger than the files, or the files do not agree with config.json on tied weights.

        network: built on the meta device. headers: headers of the tensors in the files, by tensor name.
        """
        is_as_stored = self.gguf is None and self.packed is None and method_of(self.config) is None
        stored_names: Iterable[str] = headers
        if self.gguf is not None:
            with read_once():
                check_tensors(network, read_header(self.gguf))
        if self.packed is not None:
            self.packed.check_shapes(network)
            stored_names = self.packed.names
        check_sizes(self.model, network, headers, is_quantised=not is_as_stored)
        if self.gguf is None:
            check_tied_names(self.model, network, stored_names)

    def dtype(self, device: torch.device, setting: str) -> torch.dtype | str:
        """Return the dtype in which the weights are loaded. The result "auto" lets transformers use the dtype in which
        they are stored.

        setting: name of a torch dtype, or "auto": float32 on a CPU, and on a GPU the dtype in which the weights are
        stored.
        """
        if setting != "auto":
            dtype: torch.dtype = getattr(torch, setting)
            return dtype
        if device.type == "cpu":
            return torch.float32
        if self.gguf is not None:
            return own_dtype(self.gguf)
        if self.packed is not None:
            return getattr(self.config, "dtype", None) or torch.bfloat16
        return "auto"

    def check_memory(self, settings: WorkerConfig, network: PreTrainedModel, device: torch.device) -> None:
        """If weights are to be unpacked, log the memory that they take; otherwise do nothing.

        Raises ConfigError if the device has less memory than that, or if the settings forbid unpacking.
        """
        if self.why_unpacked is not None:
            check_unpacked(settings, self.why_unpacked, network, self.dtype(device, settings.dtype), device)

    def arguments(self, dtype: torch.dtype | str) -> tuple[str | None, dict[str, Any]]:
        """Return the arguments of `from_pretrained`: folder or hub id, and options by name. For a quantised checkpoint
        that is unpacked, the first is None, and the weights are the option `state_dict`.
        """
        options: dict[str, Any] = {"config": self.config, "dtype": dtype, "use_safetensors": True}
        if self.gguf is not None:
            return str(self.gguf.parent), options | weight_options(self.gguf)
        if self.packed is not None:
            return None, options | {"state_dict": self.packed.state(dtype)}
        return self.model, options

    def reading(self) -> contextlib.AbstractContextManager[None]:
        """Return the context manager in which `from_pretrained` must be called to read the weights."""
        if self.gguf is None:
            return contextlib.nullcontext()
        return reading()
