"""The interface of a way to run the model. `ModelRunner` checks rows and reserves blocks; a path computes.

fused: a forward of our own in C++ for the families that drafts and targets mostly are (CPU).
flash: the paged path on a GPU, over flash attention with CUDA graphs.
paged: transformers' modules over packed tokens, with our attention and a block table.
dense: transformers' modules and attention over gathered rows; runs whatever transformers can run with a cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

from outrider.engine.step_plan import Row

BLOCK_SIZE = 16
"""Tokens a block, where nothing asks for another size. The C++ kernels are compiled for it."""
NORMED = -1
"""The tap after the final norm: the hidden states that the model's head reads. Tap k of 0 to n is the input of layer k,
and the last layer's output at n."""


class ForwardPath(Protocol):
    """Runs a model over rows whose KV lies in blocks of its own storage."""

    name: str
    """fused, flash, paged or dense, as the log, GetInfo and benchmarks show it."""
    batch_invariant: bool
    """Whether a token's logits are the same bits whatever else is in the forward and however its row was cut."""
    block_size: int
    """Tokens that a block of its storage holds."""

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes that one token takes in all layers: its KV, and whatever else a layer keeps of it. May be 0 before the
        first forward."""

    def set_storage(self, num_blocks: int, block_size: int) -> None:
        """Replace the storage by an empty one of num_blocks and block 0, the trash. Raises what torch raises."""

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy blocks, (from, to) pairs, in every layer: a table is about to write into a block that others read."""

    def forward(self, rows: Sequence[Row]) -> Tensor:
        """Write the new tokens' KV and return their logits [sum(num_logits), V] float32, rows in order.

        Rows are checked and their tables reserved. Raises InvalidRequest for a token id outside the vocabulary.
        Called in inference mode, on the engine thread.
        """


@runtime_checkable
class RunsTrees(Protocol):
    """A path whose rows may be token trees (`Row.parents`), if the self-test of trees finds the model able."""

    def move_tokens(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """Move what every layer keeps from `sources` to `destinations`, indices counted in tokens over all blocks.

        A destination may also be a source: all are read before any is written.
        """


@runtime_checkable
class GivesFeatures(Protocol):
    """A path that gives the model's hidden states, if the self-test of features finds them right.

    Tap k of 0 to num_layers - 1 is the input of decoder layer k, num_layers the output of the last layer, NORMED that
    output after the final norm.
    """

    def set_taps(self, taps: Sequence[int]) -> None:
        """Tap these hidden states in the forwards that follow, and no others; of none a forward costs nothing more, but
        where it was captured with some.
        """

    @property
    def features(self) -> Tensor:
        """[sum(num_new), taps, hidden] of the last forward, on the model's device; no rows where nothing is tapped.

        All new tokens of all rows, in order, whether their logits are wanted or not; taps in the order they were set.
        float32 from fused, the model's dtype from others. A later forward leaves it as it is.
        """


@runtime_checkable
class Repacks(Protocol):
    """A path that keeps the weights in a form of its own, after which the model's modules may be dropped."""

    @property
    def weights_bytes(self) -> int:
        """Bytes of the weights as the path holds them; an embedding beside an equal head counts where both are kept."""


@runtime_checkable
class Prepares(Protocol):
    """A path with work to do between load and the first request, once its storage is set."""

    def prepare(self, max_rows: int, context_limit: int) -> None:
        """Do that work. max_rows: sequences that a forward may hold."""
