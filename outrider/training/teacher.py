"""The target in a training: its logits and hidden states along whole texts, and the batches of these texts.

Used by `run` and `measure`, and by the students.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from outrider.engine.architectures.context import context_limit_of, settle_rope
from outrider.engine.loading.loader import network_class, read_config
from outrider.training.optimizing import mixed_precision
from outrider.training.written import Answer
from outrider.wire.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Batch:
    """B texts, each a prompt with the target's output for it. They are padded at the end to the length T of
    the longest.
    """

    ids: Tensor
    """Token ids of prompts and outputs, [B, T] int64; 0 for padding."""
    starts: Tensor
    """Number of prompt tokens of each text, [B] int64."""
    lengths: Tensor
    """Number of tokens of each text, prompt and output, [B] int64."""

    @classmethod
    def of(cls, answers: Sequence[Answer], device: str) -> Batch:
        """Return the batch of these outputs, on the device."""
        longest = max(len(answer.ids) for answer in answers)
        ids = np.zeros((len(answers), longest), dtype=np.int64)  # [B, T]
        for row, answer in zip(ids, answers, strict=True):
            row[: len(answer.ids)] = answer.ids
        counts = torch.tensor([[answer.start, len(answer.ids)] for answer in answers], device=device)  # [B, 2] int64
        return cls(torch.from_numpy(ids).to(device), counts[:, 0], counts[:, 1])

    def trained_mask(self, depth: int) -> Tensor:
        """Return a mask [B, T] bool of the tokens after which a draft token at `depth` is trained.

        depth: position of the draft token in its round, from 0. The mask leaves out tokens whose round would begin
        (`depth` tokens earlier) before the last token of the prompt, and tokens after which the text has no further
        token.
        """
        # 2 prompt tokens, 5 in all: depth 0 [0 1 1 1 0], depth 1 [0 0 1 1 0]
        positions = torch.arange(self.ids.shape[1], device=self.ids.device)  # [T]
        return (positions >= self.starts[:, None] - 1 + depth) & (positions < self.lengths[:, None] - 1)


@dataclass(frozen=True, slots=True)
class TargetOutput:
    """The target's logits and hidden states along a batch."""

    logits: Tensor
    """Logits after M tokens of the batch, [M, V] float32. These are the tokens of `Batch.trained_mask(0)`."""
    token_indices: Tensor
    """Indices of these M tokens in the batch flattened to [B * T]. [M] int64, ascending."""
    hidden: Sequence[Tensor]
    """Hidden states [B, T, dt] of a target with n layers: entries 0 to n - 1 are the inputs of the layers, and the last
    entry is the state after the final norm. Empty if transformers returns no hidden states."""

    def rows(self, token_indices: Tensor) -> Tensor:
        """Return the indices into `logits` of the rows that belong to N given tokens, [N] int64. token_indices: the tokens'
        indices in the batch flattened to [B * T]; all of them must be in `self.token_indices`.
        """
        return torch.searchsorted(self.token_indices, token_indices)

    def taps(self, selected: Sequence[int]) -> Tensor:
        """Return m of the target's hidden states for each token, [B, T, m, dt] float32.

        selected: m indices into `hidden`. The constant NORMED stands for the last entry of `hidden`, the state after
        the final norm.
        """
        return torch.stack([self.hidden[tap].float() for tap in selected], dim=2)


class Teacher:
    """The target as the model that a student learns to predict. Its weights are not changed."""

    def __init__(self, folder: str, device: str) -> None:
        """Load the model of `folder`: in float32 on a CPU, in the dtype of its files on a GPU.

        Forwards on a GPU run in bfloat16. Raises ConfigError for a configuration that cannot be read.
        """
        self.device = device
        self.folder = folder
        dtype = torch.float32 if device == "cpu" else "auto"
        config = read_config(folder)
        network: Any = network_class(config).from_pretrained(folder, config=config, dtype=dtype, use_safetensors=True)
        settle_rope(network, context_limit_of(network.config, None))
        self.network = network.to(device).eval().requires_grad_(False)
        text = self.network.config.get_text_config(decoder=True)
        self.num_layers: int = text.num_hidden_layers
        self.width: int = text.hidden_size
        self.vocab_size: int = text.vocab_size
        self._lm_head: nn.Module = self.network.get_output_embeddings()

    @torch.no_grad()
    def see(self, batch: Batch) -> TargetOutput:
        """Run a forward of the target over the batch. Return its hidden states at all tokens, and its logits after the
        tokens of `batch.trained_mask(0)` alone.
        """
        mask = batch.trained_mask(0)  # [B, T] bool
        with mixed_precision(self.device), self._logits_at(mask):
            output = self.network(input_ids=batch.ids, use_cache=False, output_hidden_states=True)
        return TargetOutput(output.logits[0].float(), indices_of(mask), output.hidden_states or ())

    def logits_of(
        self, embedded: Tensor, positions: Tensor, mask: Tensor | dict[str, Tensor], is_selected: Tensor
    ) -> Tensor:
        """Run a forward of the target over embeddings instead of token ids. Return the logits [M, V] float32 at the M
        positions where `is_selected` is True. Gradients flow back to the embeddings.

        embedded: [B, Q, dt], for Q tokens of each text. positions: [B, Q] int64. is_selected: [B, Q] bool. mask: the
        attention mask in the form that the model expects; a dict has one mask per type of layer.
        """
        with mixed_precision(self.device), self._logits_at(is_selected):
            output = self.network(inputs_embeds=embedded, position_ids=positions, attention_mask=mask, use_cache=False)
        logits: Tensor = output.logits[0].float()  # [M, V]
        return logits

    @contextmanager
    def _logits_at(self, mask: Tensor) -> Iterator[None]:
        # the lm_head gets the inputs [1, M, dt] where the mask [B, T] holds, of all [B, T, dt]
        hook = self._lm_head.register_forward_pre_hook(lambda module, args: (args[0][mask][None],))
        try:
            yield
        finally:
            hook.remove()

    def check_hidden(self) -> None:
        """Raise ConfigError if transformers does not return a hidden state of the target's width before every layer and
        after the final norm.
        """
        probe = Batch.of([Answer(np.zeros(2, dtype=np.int32), 1, 0.0)], self.device)
        shapes = [tuple(state.shape) for state in self.see(probe).hidden]
        if shapes != [(1, 2, self.width)] * (self.num_layers + 1):
            raise ConfigError(
                f"{type(self.network).__name__} in {self.folder} gives no hidden state of width {self.width} before "
                f"each of its {self.num_layers} layers and after its last norm, which heads read; train a draft instead"
            )


def indices_of(mask: Tensor) -> Tensor:
    """Return the indices of the tokens at which `mask` [B, T] is True, in the batch flattened to [B * T]. [M] int64,
    ascending.
    """
    return mask.flatten().nonzero()[:, 0]


def shuffled(count: int, size: int, seed: int) -> Iterator[NDArray[np.int64]]:
    """Yield batches without end. A batch is the indices [size] int64 of some of `count` outputs. Each epoch (pass over
    all outputs) has another order, which depends on `seed`.

    If the indices left at the end of an epoch are too few for a batch, they begin the next epoch's first batch.
    """
    remaining = np.empty(0, dtype=np.int64)
    epoch = 0
    while True:
        while len(remaining) < size:
            remaining = np.concatenate([remaining, np.random.default_rng((seed, epoch)).permutation(count)])
            epoch += 1
        yield remaining[:size]
        remaining = remaining[size:]
