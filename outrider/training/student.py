"""What is trained: the protocol, and a stand-alone draft."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from outrider.training.optimizing import mixed_precision
from outrider.training.teacher import Batch, Seen


@dataclass(frozen=True, slots=True)
class Guess:
    """What a drafter says of its draft tokens of one depth, the first of a round at 0."""

    depth: int
    places: Tensor
    """[M] int64, the tokens of the batch, counted through its rows, after which the guessed ones stand."""
    logits: Tensor
    """[M, W], of the student's `ids`."""


class Student(Protocol):
    """A drafter in training."""

    @property
    def module(self) -> nn.Module:
        """Whatever is needed to go on, frozen parts too."""

    @property
    def ids(self) -> Tensor | None:
        """The token ids [W] int64 that it can say; None for all."""

    @property
    def depth_trained(self) -> int:
        """Depths whose losses are summed."""

    @property
    def depth_limit(self) -> int | None:
        """Most draft tokens that it has something to say of; None for no limit."""

    def guesses(self, batch: Batch, seen: Seen, depth: int) -> Iterator[Guess]:
        """Yield what it says at each depth below `depth` where the batch asks, along the target's own text."""

    def save(self, folder: Path) -> None:
        """Write what a draft worker loads, in bfloat16."""


class Draft:
    """A causal language model: it says the same whichever draft token it is."""

    ids = None
    depth_trained = 1
    depth_limit = None

    def __init__(self, folder: str, device: str) -> None:
        self._folder, self._device = folder, device
        network: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.module = network.to(device)

    def guesses(self, batch: Batch, seen: Seen, depth: int) -> Iterator[Guess]:
        with mixed_precision(self._device):
            logits = self.module(input_ids=batch.ids, use_cache=False).logits.flatten(0, 1)  # [B * T, V]
        for skipped in range(depth):
            places = places_of(batch.asked(skipped))
            yield Guess(skipped, places, logits[places])

    def save(self, folder: Path) -> None:
        copy.deepcopy(self.module).to(torch.bfloat16).save_pretrained(folder)
        AutoTokenizer.from_pretrained(self._folder).save_pretrained(folder)


def places_of(asked: Tensor) -> Tensor:
    """Return the places [M] int64 where `asked` [B, T] holds, counted through the rows."""
    return asked.flatten().nonzero()[:, 0]
