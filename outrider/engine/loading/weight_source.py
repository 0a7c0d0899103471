"""Where weights come from and in which form: as they are stored, unpacked, or of a GGUF file. Used by the loader."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
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
    unpacked_config,
    why_to_unpack,
)
from outrider.engine.quantization.unpack import PackedCheckpoint
from outrider.wire.models.gguf_header import read_header
from outrider.wire.settings.config import WorkerConfig


@dataclass(frozen=True, slots=True)
class WeightSource:
    """The weights of one model before they are read."""

    model: str
    """Folder, GGUF file or hub id."""
    config: PreTrainedConfig
    """Of the network that is built: without a quantisation where the weights are unpacked."""
    gguf: Path | None = None
    packed: PackedCheckpoint | None = None
    why_unpacked: str | None = None
    """Why they are unpacked at load, in words; None where they are not."""

    @classmethod
    def as_stored(cls, model: str, config: PreTrainedConfig) -> WeightSource:
        """Return the weights as they are, on any device."""
        return cls(model, config, gguf_path(model))

    @classmethod
    def find(cls, model: str, config: PreTrainedConfig, device: torch.device, quantization: str) -> WeightSource:
        """Return the weights as the device takes them. Raises ConfigError where it takes them in no form.

        quantization: the setting.
        """
        gguf = gguf_path(model)
        if gguf is not None:
            return cls(model, config, gguf, why_unpacked=stored_types(gguf))
        why = why_to_unpack(model, config, device, quantization)
        if why is None:
            return cls(model, config)
        packed = PackedCheckpoint.read(model, quantization_of(config))
        return cls(model, unpacked_config(config), packed=packed, why_unpacked=why)

    def check(self, network: PreTrainedModel, headers: Mapping[str, TensorHeader]) -> None:
        """Raise ConfigError unless the files hold the network's weights. network: on the meta device. headers: of the
        files.
        """
        is_as_stored = self.gguf is None and self.packed is None and method_of(self.config) is None
        if self.gguf is not None:
            with read_once():
                check_tensors(network, read_header(self.gguf))
        if self.packed is not None:
            self.packed.check_shapes(network)
        check_sizes(self.model, network, headers, is_quantised=not is_as_stored)
        if self.gguf is None:
            check_tied_names(self.model, network, headers if self.packed is None else self.packed.names)

    def dtype(self, device: torch.device, wanted: str) -> torch.dtype | str:
        """Return the dtype that weights are loaded in; "auto" where transformers takes the one they are stored in."""
        if wanted != "auto":
            dtype: torch.dtype = getattr(torch, wanted)
            return dtype
        if device.type == "cpu":
            return torch.float32
        if self.gguf is not None:
            return own_dtype(self.gguf)
        if self.packed is not None:
            return getattr(self.config, "dtype", None) or torch.bfloat16
        return "auto"

    def check_memory(self, settings: WorkerConfig, network: PreTrainedModel, device: torch.device) -> None:
        """Say what unpacked weights take. Raises ConfigError where there is less memory, or the settings refuse it."""
        if self.why_unpacked is not None:
            check_unpacked(settings, self.why_unpacked, network, self.dtype(device, settings.dtype), device)

    def arguments(self, dtype: torch.dtype | str) -> tuple[str | None, dict[str, Any]]:
        """Return the place and the options with which a class's `from_pretrained` reads the weights."""
        options: dict[str, Any] = {"config": self.config, "dtype": dtype, "use_safetensors": True}
        if self.gguf is not None:
            return str(self.gguf.parent), options | weight_options(self.gguf)
        if self.packed is not None:
            return None, options | {"state_dict": self.packed.state(dtype)}
        return self.model, options

    def reading(self) -> contextlib.AbstractContextManager[None]:
        """Return the context to read the weights in."""
        return contextlib.nullcontext() if self.gguf is None else reading()
