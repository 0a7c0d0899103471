"""The target as it is trained from: along whole sequences, its law after each token and its hidden states."""

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
    """B answers side by side, the shorter ones filled up at the end, where nothing is asked."""

    ids: Tensor
    """[B, T] int64."""
    starts: Tensor
    """[B] int64, tokens of the prompts."""
    lengths: Tensor
    """[B] int64, tokens of prompt and answer."""

    @classmethod
    def of(cls, answers: Sequence[Answer], device: str) -> Batch:
        longest = max(len(answer.ids) for answer in answers)
        ids = np.zeros((len(answers), longest), dtype=np.int64)
        for row, answer in zip(ids, answers, strict=True):
            row[: len(answer.ids)] = answer.ids
        counts = torch.tensor([[answer.start, len(answer.ids)] for answer in answers], device=device)
        return cls(torch.from_numpy(ids).to(device), counts[:, 0], counts[:, 1])

    def asked(self, depth: int) -> Tensor:
        """Return [B, T] bool: whether the law after that token is one to guess for a draft token of that depth.

        The token before those that the guess skips is the last of the prompt or a later one, and the token that the law
        is of is in the text.
        """
        places = torch.arange(self.ids.shape[1], device=self.ids.device)
        return (places >= self.starts[:, None] - 1 + depth) & (places < self.lengths[:, None] - 1)


@dataclass(frozen=True, slots=True)
class Seen:
    """What the target says of a batch."""

    logits: Tensor
    """[M, V] float32, of what follows each token after which the batch asks a first draft token: `Batch.asked(0)`."""
    places: Tensor
    """[M] int64, those tokens, counted through the rows, ascending."""
    hidden: Sequence[Tensor]
    """Taps 0 to n - 1, each [B, T, dt], and at the end the one after the final norm. Empty where there are
    none."""

    def rows(self, places: Tensor) -> Tensor:
        """Return the indices [N] int64 in `logits` of some of its places [N]."""
        return torch.searchsorted(self.places, places)

    def taps(self, wanted: Sequence[int]) -> Tensor:
        """Return [B, T, m, dt] float32."""
        return torch.stack([self.hidden[tap].float() for tap in wanted], dim=2)


class Teacher:
    """A frozen target."""

    def __init__(self, folder: str, device: str) -> None:
        """Load it in float32 on a CPU, in the dtype of its files on a GPU, where forwards are in bfloat16 anyway."""
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
    def see(self, batch: Batch) -> Seen:
        """Return what it says of the batch. Its lm_head runs only where the batch asks."""
        asked = batch.asked(0)  # [B, T]
        with mixed_precision(self.device), self._only(asked):
            output = self.network(input_ids=batch.ids, use_cache=False, output_hidden_states=True)
        return Seen(output.logits[0].float(), places_of(asked), output.hidden_states or ())

    def say(self, embedded: Tensor, positions: Tensor, mask: Tensor | dict[str, Tensor], wanted: Tensor) -> Tensor:
        """Return the logits [M, V] float32 at the wanted places, [B, Q] bool, of embeddings [B, Q, dt] at those
        positions [B, Q], of which each reads what the mask says. Gradients go back to the embeddings.
        """
        with mixed_precision(self.device), self._only(wanted):
            output = self.network(inputs_embeds=embedded, position_ids=positions, attention_mask=mask, use_cache=False)
        logits: Tensor = output.logits[0].float()
        return logits

    @contextmanager
    def _only(self, asked: Tensor) -> Iterator[None]:
        """Give the lm_head [1, M, dt] of what it would read, [B, T, dt]."""
        hook = self._lm_head.register_forward_pre_hook(lambda module, args: (args[0][asked][None],))
        try:
            yield
        finally:
            hook.remove()

    def check_hidden(self) -> None:
        """Raise ConfigError where transformers gives not all hidden states."""
        probe = Batch.of([Answer(np.zeros(2, dtype=np.int32), 1, 0.0)], self.device)
        shape, hidden = (1, 2, self.width), self.see(probe).hidden
        if [tuple(state.shape) for state in hidden] != [shape] * (self.num_layers + 1):
            raise ConfigError(
                f"{type(self.network).__name__} in {self.folder} gives no hidden state of width {self.width} before "
                f"each of its {self.num_layers} layers and after its last norm, which heads read; train a draft instead"
            )


def places_of(asked: Tensor) -> Tensor:
    """Return the places [M] int64 where `asked` [B, T] holds, counted through the rows."""
    return asked.flatten().nonzero()[:, 0]


def shuffled(count: int, size: int, seed: int) -> Iterator[NDArray[np.int64]]:
    """Yield, without end, the indices [size] of each batch of `count` answers: epoch by epoch in another order.

    An epoch's last indices, too few for a batch, begin the next one.
    """
    left = np.empty(0, dtype=np.int64)
    epoch = 0
    while True:
        while len(left) < size:
            left = np.concatenate([left, np.random.default_rng((seed, epoch)).permutation(count)])
            epoch += 1
        yield left[:size]
        left = left[size:]
