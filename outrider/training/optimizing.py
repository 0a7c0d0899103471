"""Optimizers, the schedule of their learning rates, and the precision of forwards.

Shared by `train-head` and by the recipes that train the demo models.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

WARMUP_STEPS = 60
"""Number of updates over which the learning rates rise to their full values."""


class Optimizers:
    """Optimizers of a model, with one schedule of learning rates: Muon for hidden matrices, AdamW for all other
    parameters.

    AdamW updates the embeddings, projections to the vocabulary, biases and norms. Parameters without requires_grad stay
    as they are. Muon matters in short trainings: the demo target reached 5.6 nats per token with it in 75 s, and 7.0
    without.
    """

    def __init__(self, model: nn.Module, unscaled: Sequence[str] = ()) -> None:
        """Create the optimizers of the model's parameters.

        unscaled: endings of the names of hidden matrices that AdamW updates, too, at a third of its rate. Muon's
        updates, all of one size, are too large for queries and keys whose products are not scaled down, such as T5's.
        """
        tables: set[int] = set()
        for module in model.modules():
            if isinstance(module, nn.Embedding):
                tables.add(id(module.weight))
        hidden: list[nn.Parameter] = []
        gentle: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            if parameter.dim() != 2 or id(parameter) in tables or "lm_head" in name:
                others.append(parameter)
            elif name.endswith(tuple(unscaled)):
                gentle.append(parameter)
            else:
                hidden.append(parameter)
        self._parameters = hidden + gentle + others
        self._optimizers: list[torch.optim.Optimizer] = []
        if hidden:
            self._optimizers.append(torch.optim.Muon(hidden, lr=0.02, momentum=0.95, weight_decay=0.01))
        for parameters, rate in ((others, 3e-3), (gentle, 1e-3)):
            if parameters:
                self._optimizers.append(torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.95), weight_decay=0.0))
        self._full_rates: list[list[float]] = []
        for optimizer in self._optimizers:
            self._full_rates.append([group["lr"] for group in optimizer.param_groups])

    def step(self, loss: Tensor, scale: float) -> None:
        """Compute the gradients of `loss`, clip them and update the parameters. scale: factor on the full learning
        rates for this update, such as the result of `rate_scale`.
        """
        for optimizer, rates in zip(self._optimizers, self._full_rates, strict=True):
            optimizer.zero_grad(set_to_none=True)
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * scale
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
        for optimizer in self._optimizers:
            optimizer.step()

    def state(self) -> list[dict[str, Any]]:
        """Return the state of the optimizers for a checkpoint, to be restored by `set_state`."""
        return [optimizer.state_dict() for optimizer in self._optimizers]

    def set_state(self, state: list[dict[str, Any]]) -> None:
        """Restore what `state` returned earlier. If the weights of the same moment are restored too, the training
        continues as if it had not been interrupted.
        """
        for optimizer, optimizer_state in zip(self._optimizers, state, strict=True):
            optimizer.load_state_dict(optimizer_state)


@dataclass(frozen=True, slots=True)
class Length:
    """Length of a training, as a time or as a number of updates. Exactly one of the two is set."""

    seconds: float | None
    steps: int | None
    """Number of updates of the weights. None if `seconds` is given."""

    def share_done(self, elapsed_s: float, step: int) -> float:
        """Return the fraction of the training that is done after `elapsed_s` seconds and `step` updates: 0 at the
        start, 1 or more at the end.
        """
        if self.steps is not None:
            return step / self.steps
        assert self.seconds is not None
        return elapsed_s / self.seconds


def rate_scale(share_done: float, step: int) -> float:
    """Return the factor on the full learning rates for the next update. It rises to 1 over WARMUP_STEPS updates, stays
    there, and falls linearly to nearly 0 in the second half of the training.

    share_done: fraction of the training that is done. step: number of updates that were already made.
    """
    warm_up = min(1.0, (step + 1) / WARMUP_STEPS)
    return warm_up * max(0.0, min(1.0, 2 * (1 - share_done))) + 0.01


def default_device() -> str:
    """Return "cuda" if torch can use a GPU, else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def has_bfloat16(device: str) -> bool:
    """Return whether the hardware of the device computes in bfloat16. Emulated bfloat16 does not count, since it is
    slower than float32.
    """
    if device.startswith("cuda"):
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    abilities = torch.cpu.get_capabilities()
    return bool(abilities.get("avx512_bf16") or abilities.get("amx_bf16") or abilities.get("bf16"))


def mixed_precision(device: str) -> contextlib.AbstractContextManager[object]:
    """Return a context manager in which forwards compute in bfloat16 if `has_bfloat16(device)`, otherwise in the dtype
    of the weights.
    """
    if not has_bfloat16(device):
        return contextlib.nullcontext()
    return torch.autocast(torch.device(device).type, dtype=torch.bfloat16)
