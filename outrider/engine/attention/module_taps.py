"""Tap a model that runs as transformers' modules, by hooks that are there only while something is tapped.

`paged` and `dense` take from it what `GivesFeatures` promises. Where a class has its layers is a guess from its shape,
which the self-test of features confirms or refuses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from outrider.engine.attention.forward_path import NORMED


def decoder_layers(model: PreTrainedModel) -> tuple[nn.Module, nn.ModuleList]:
    """Return the module that runs the decoder layers and the final norm, and the layers.

    Raises LookupError, at the self-test, for a class that keeps its layers in another way.
    """
    decoder = model.get_decoder()
    num_layers = model.config.get_text_config(decoder=True).num_hidden_layers
    lists = {
        name: module
        for name, module in decoder.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == num_layers
    }
    if not lists:
        raise LookupError(f"{type(model).__name__} has no list of its {num_layers} layers")
    name = min(lists, key=lambda name: name.count("."))  # as many experts lie deeper
    return decoder.get_submodule(name.rpartition(".")[0]), lists[name]


class ModuleTaps:
    """Keeps the tapped hidden states of the forward that runs."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._taps: tuple[int, ...] = ()
        self._hooks: list[RemovableHandle] = []
        self._seen: dict[int, Tensor] = {}

    def set(self, taps: Sequence[int]) -> None:
        """Tap these, as `GivesFeatures.set_taps` says."""
        for hook in self._hooks:
            hook.remove()
        self._taps, self._hooks = tuple(taps), [self._hooked(tap) for tap in dict.fromkeys(taps)]
        self._seen.clear()

    def take(self) -> Tensor | None:
        """Return the features [B, q, taps, hidden] of the forward that has run; None where nothing is tapped."""
        if not self._taps:
            return None
        features = torch.stack([self._seen[tap] for tap in self._taps], dim=2)
        self._seen.clear()
        return features

    def _hooked(self, tap: int) -> RemovableHandle:
        decoder, layers = decoder_layers(self._model)

        def see_output(module: nn.Module, args: Any, output: Any) -> None:
            self._seen[tap] = output if isinstance(output, Tensor) else output[0]

        def see_input(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._seen[tap] = args[0] if args else kwargs["hidden_states"]

        if tap == NORMED:
            return decoder.register_forward_hook(see_output)
        if tap == len(layers):
            return layers[-1].register_forward_hook(see_output)
        return layers[tap].register_forward_pre_hook(see_input, with_kwargs=True)
