"""Optimizers, their schedule, and the precision of forwards: shared by the demo pair's recipe and `train-head`."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

WARMUP_STEPS = 60
"""Steps over which the learning rate rises to its full value. Doubling it spends more of a short run at low rates."""


class Optimizers:
    """Muon for the hidden matrices, AdamW for embeddings, projections to the vocabulary, biases and norms, under one
    schedule. Parameters without requires_grad are left alone.

    Muon matters where little is trained: after 75 s on two cores the demo target reached 5.6 nats a token where AdamW
    alone reached 7.0.
    """

    def __init__(self, model: nn.Module, unscaled: Sequence[str] = ()) -> None:
        """unscaled: ends of the names of hidden matrices for AdamW at a third of its rate. Muon's updates, all of one
        size, are too large for queries and keys whose products nothing scales down, as T5's.
        """
        tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
        hidden, gentle, others = list[nn.Parameter](), list[nn.Parameter](), list[nn.Parameter]()
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                is_hidden = parameter.dim() == 2 and id(parameter) not in tables and "lm_head" not in name
                kind = others if not is_hidden else gentle if name.endswith(tuple(unscaled)) else hidden
                kind.append(parameter)
        self._parameters = hidden + gentle + others
        self._all: list[torch.optim.Optimizer] = []
        if hidden:
            self._all.append(torch.optim.Muon(hidden, lr=0.02, momentum=0.95, weight_decay=0.01))
        for parameters, rate in ((others, 3e-3), (gentle, 1e-3)):
            if parameters:
                self._all.append(torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.95), weight_decay=0.0))
        self._full_rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in self._all]

    def step(self, loss: Tensor, scale: float) -> None:
        """Make one update at `scale` times the full learning rates."""
        for optimizer, rates in zip(self._all, self._full_rates, strict=True):
            optimizer.zero_grad(set_to_none=True)
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * scale
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
        for optimizer in self._all:
            optimizer.step()

    def state(self) -> list[dict[str, Any]]:
        """Return what `set_state` takes: with it and the weights, updates go on as if they had never stopped."""
        return [optimizer.state_dict() for optimizer in self._all]

    def set_state(self, state: list[dict[str, Any]]) -> None:
        for optimizer, own in zip(self._all, state, strict=True):
            optimizer.load_state_dict(own)


@dataclass(frozen=True, slots=True)
class Length:
    """Of a training run. Exactly one of the two is set."""

    seconds: float | None
    steps: int | None

    def share_done(self, elapsed_s: float, step: int) -> float:
        """Return the share of the run that is done: 0 at the start, 1 or more at the end."""
        if self.steps is not None:
            return step / self.steps
        assert self.seconds is not None
        return elapsed_s / self.seconds


def rate_scale(share_done: float, step: int) -> float:
    """Return the share of the full rate: a short warm-up, held, then linear to nearly zero from half-way on."""
    warm_up = min(1.0, (step + 1) / WARMUP_STEPS)
    return warm_up * max(0.0, min(1.0, 2 * (1 - share_done))) + 0.01


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def has_bfloat16(device: str) -> bool:
    """Return whether bfloat16 products run at speed; emulated ones are slower than float32."""
    if device.startswith("cuda"):
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    abilities = torch.cpu.get_capabilities()
    return bool(abilities.get("avx512_bf16") or abilities.get("amx_bf16") or abilities.get("bf16"))


def mixed_precision(device: str) -> contextlib.AbstractContextManager[object]:
    """Run forwards in bfloat16 where the device is good at it, else in the weights' own type."""
    if not has_bfloat16(device):
        return contextlib.nullcontext()
    return torch.autocast(torch.device(device).type, dtype=torch.bfloat16)
