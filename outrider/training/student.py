"""The protocol of a drafter in training, and the draft model as the simplest one.

The others are `Eagle3`, `Medusa` and `LookaheadEmbeddings`. `train_head` creates them, `run` trains and `measure`
measures them.
"""

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
from outrider.training.teacher import Batch, TargetOutput, indices_of
from outrider.wire.errors import ConfigError
from outrider.wire.models.tokenizer_json import TOKENIZER_CONFIG, TOKENIZER_JSON


@dataclass(frozen=True, slots=True)
class DraftLogits:
    """Logits of a student for the draft tokens of one depth, at M positions of a batch."""

    depth: int
    """Index of the draft token in its round, from 0."""
    token_indices: Tensor
    """For each draft token the index of the token before it, in the batch flattened to [B * T]. [M] int64, ascending.
    """
    logits: Tensor
    """Logits [M, W] over the token ids in the student's `ids`."""


class Student(Protocol):
    """A drafter that is trained: a draft model, a head or look-ahead embeddings."""

    @property
    def module(self) -> nn.Module:
        """Module with all parameters of the student, including frozen ones."""

    @property
    def ids(self) -> Tensor | None:
        """Token ids [W] int64 that the student can propose; None = all ids of the target."""

    @property
    def depth_trained(self) -> int:
        """Number of draft tokens of a round for which the student is trained. The loss of an update sums the losses of
        all of them.
        """

    @property
    def depth_limit(self) -> int | None:
        """Maximum number of draft tokens of a round that the student can propose; None = no limit."""

    def draft_logits(self, batch: Batch, target_output: TargetOutput, depth: int) -> Iterator[DraftLogits]:
        """Yield the student's logits for the draft tokens at depth 0, 1, ... `depth` - 1, where depth 0 is the first
        draft token of a round. Each depth has one row per token after which a draft token at that depth is trained.

        The texts of the batch are the target's own outputs, so the student reads what it would read after the target
        accepted all earlier draft tokens. target_output: the target's output for this batch, whose hidden states heads
        read.
        """

    def save(self, folder: Path) -> None:
        """Write the files with which a worker uses the trained drafter to `folder`, with weights in bfloat16."""


class Draft:
    """Student that is a draft model (a causal language model). Its logits after a token are the same at every depth."""

    ids = None
    """Token ids that the model can propose: None, since it can propose all."""
    depth_trained = 1
    """Number of draft tokens of a round for which a draft model is trained: one, since its loss after a token is the
    same at every depth."""
    depth_limit = None
    """Maximum number of draft tokens of a round: None, since the model can draft any number."""

    def __init__(self, folder: str, vocab_size: int, device: str) -> None:
        """Load the model of `folder` in float32.

        vocab_size: number of the target's logits. Raises ConfigError for a draft with another number of logits.
        """
        self._folder = folder
        self._device = device
        config = read_config(folder)
        options = {"config": config, "dtype": torch.float32, "use_safetensors": True}
        network: Any = network_class(config).from_pretrained(folder, **options)
        draft_vocab_size = network.config.get_text_config(decoder=True).vocab_size
        if draft_vocab_size != vocab_size:
            raise ConfigError(
                f"{folder} has logits for {draft_vocab_size} ids and the target for {vocab_size}; training needs a "
                "draft with as many"
            )
        self.module = network.to(device)

    def draft_logits(self, batch: Batch, target_output: TargetOutput, depth: int) -> Iterator[DraftLogits]:
        """Run one forward of the draft model over the batch. For each depth k from 0 to `depth` - 1, yield its logits
        after the tokens at which `batch.trained_mask(k)` is True. target_output: not used.
        """
        with mixed_precision(self._device):
            logits = self.module(input_ids=batch.ids, use_cache=False).logits.flatten(0, 1)  # [B * T, V]
        for skipped in range(depth):
            token_indices = indices_of(batch.trained_mask(skipped))  # [M] int64
            yield DraftLogits(skipped, token_indices, logits[token_indices])

    def save(self, folder: Path) -> None:
        """Write a model folder: weights in bfloat16, and the files of the tokenizer."""
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
    """Write tensors to model.safetensors in `folder`, with the usual permissions of a new file. (Safetensors' own
    `save_file` makes a file that only its owner can read.)
    """
    data = save({name: tensor.contiguous() for name, tensor in tensors.items()}, {"format": "pt"})
    (folder / "model.safetensors").write_bytes(data)
