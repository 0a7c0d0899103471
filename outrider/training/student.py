"""What is trained: the protocol, and a stand-alone draft."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import save
from torch import Tensor, nn

from outrider.engine.files.tokenizer_files import TEMPLATE, tokenizer_files
from outrider.engine.loading.loader import network_class, read_config
from outrider.training.optimizing import mixed_precision
from outrider.training.teacher import Batch, Seen, places_of
from outrider.wire.errors import ConfigError
from outrider.wire.models.tokenizer_json import TOKENIZER_CONFIG, TOKENIZER_JSON


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

    def __init__(self, folder: str, vocab_size: int, device: str) -> None:
        """Load it. vocab_size: V, of the target. Raises ConfigError for a draft with another one."""
        self._folder, self._device = folder, device
        config = read_config(folder)
        options = {"config": config, "dtype": torch.float32, "use_safetensors": True}
        network: Any = network_class(config).from_pretrained(folder, **options)
        own = network.config.get_text_config(decoder=True).vocab_size
        if own != vocab_size:
            raise ConfigError(
                f"{folder} has logits for {own} ids and the target for {vocab_size}; training needs a "
                "draft with as many"
            )
        self.module = network.to(device)

    def guesses(self, batch: Batch, seen: Seen, depth: int) -> Iterator[Guess]:
        with mixed_precision(self._device):
            logits = self.module(input_ids=batch.ids, use_cache=False).logits.flatten(0, 1)  # [B * T, V]
        for skipped in range(depth):
            places = places_of(batch.asked(skipped))
            yield Guess(skipped, places, logits[places])

    def save(self, folder: Path) -> None:
        copy.deepcopy(self.module).to(torch.bfloat16).save_pretrained(folder)
        files = tokenizer_files(self._folder)
        contents = {
            TOKENIZER_JSON: files.tokenizer_json,
            TOKENIZER_CONFIG: files.tokenizer_config_json,
            TEMPLATE: files.chat_template,
        }
        for name, content in contents.items():
            if content:
                (folder / name).write_bytes(content)


def write_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write model.safetensors, which everybody may read whom the folder lets: save_file makes it ours alone."""
    data = save({name: tensor.contiguous() for name, tensor in tensors.items()}, {"format": "pt"})
    (folder / "model.safetensors").write_bytes(data)
