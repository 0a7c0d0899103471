"""Tap the hidden states of a model that runs as transformers' modules, by hooks that exist only while a tap is set.

`paged` and `dense` implement `FeaturePath` with it. The list of modules that are the layers is found by its length, and
the self-test of hidden states confirms or refuses it.
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
    """Return the module that runs the decoder layers and the final norm, and the list of these layers.

    Raises LookupError, at the self-test, for a class without such a list.
    """
    decoder = model.get_decoder()
    num_layers = model.config.get_text_config(decoder=True).num_hidden_layers
    lists: dict[str, nn.ModuleList] = {}
    for name, module in decoder.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            lists[name] = module
    if not lists:
        raise LookupError(f"{type(model).__name__} has no list of its {num_layers} layers")
    name = min(lists, key=lambda name: name.count("."))  # a list of as many experts lies deeper
    return decoder.get_submodule(name.rpartition(".")[0]), lists[name]


class ModuleTaps:
    """Hooks on one model that record the hidden states at the chosen taps, and keep those of the last forward."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._taps: tuple[int, ...] = ()
        self._hooks: list[RemovableHandle] = []
        self._states: dict[int, Tensor] = {}  # by tap, [B, q, hidden]

    def set(self, taps: Sequence[int]) -> None:
        """Set which hidden states later forwards record. `taps`: k = the input of decoder layer k, the number of layers
        = the last layer's output, `NORMED` = that output after the final norm; empty = none.

        Raises LookupError if the class has no list of its layers; later forwards then record nothing.
        """
        for hook in self._hooks:
            hook.remove()
        self._taps = ()
        self._hooks = []
        self._states.clear()
        self._hooks = [self._add_hook(tap) for tap in dict.fromkeys(taps)]
        self._taps = tuple(taps)

    def pop(self) -> Tensor | None:
        """Return the tapped hidden states of the last forward, [B, q, taps, d] for q new tokens per sequence, and drop
        them; None if there are no taps.
        """
        if not self._taps:
            return None
        features = torch.stack([self._states[tap] for tap in self._taps], dim=2)
        self._states.clear()
        return features

    def _add_hook(self, tap: int) -> RemovableHandle:
        decoder, layers = decoder_layers(self._model)

        def keep_output(module: nn.Module, args: Any, output: Any) -> None:
            if not isinstance(output, Tensor):
                output = output[0]
            self._states[tap] = output

        def keep_input(module: nn.Module, args: Any, kwargs: Any) -> None:
            if args:
                self._states[tap] = args[0]
            else:
                self._states[tap] = kwargs["hidden_states"]

        if tap == NORMED:
            return decoder.register_forward_hook(keep_output)
        if tap == len(layers):
            return layers[-1].register_forward_hook(keep_output)
        return layers[tap].register_forward_pre_hook(keep_input, with_kwargs=True)
