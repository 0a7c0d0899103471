"""What a way of running the model must offer. `ModelRunner` checks rows and reserves blocks; a path computes.

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
"""Tokens a block, where nothing asks for another size."""


class PathUnavailable(Exception):
    """A path cannot run this model here; the message says why, in a few words."""


class ForwardPath(Protocol):
    name: str
    """fused, flash, paged or dense: in the log, in GetInfo and in benchmarks."""
    batch_invariant: bool
    """A token's logits are the same bits whatever else is in the forward and however its row was cut into feeds."""
    block_size: int
    """Tokens a block of its storage holds."""

    @property
    def kv_bytes_per_token(self) -> int:
        """KV cache of one token over all layers. May be 0 before the first forward."""

    def set_storage(self, num_blocks: int, block_size: int) -> None:
        """Begin again with empty storage of blocks 0 (trash, see kv_pool) to num_blocks. Raises what torch raises."""

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """(from, to), in every layer: a table is about to write into a block that others read."""

    def forward(self, rows: Sequence[Row]) -> Tensor:
        """-> [sum(num_logits), V] float32, rows in order; writes the new tokens' KV.

        Rows are checked and their tables reserved. Raises InvalidRequest for a token id outside the vocabulary.
        Called in inference mode, on the engine thread.
        """


@runtime_checkable
class RunsTrees(Protocol):
    """A path whose rows may be token trees (`Row.parents`), as far as the model's own modules let it: the self-test of
    trees has the last word."""

    def move_tokens(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """KV of every layer from one place of the storage to another, which may have been a source: all are read first.

        Counted in tokens over all blocks.
        """


@runtime_checkable
class Repacks(Protocol):
    """A path that has the weights in a form of its own, after which the model's modules may go."""

    @property
    def weights_bytes(self) -> int:
        """As it holds them. A head that shares the embedding's weights is packed, and counts beside them."""


@runtime_checkable
class Prepares(Protocol):
    """A path with work to do between load and the first request, once its storage stands."""

    def prepare(self, max_rows: int, context_limit: int, *, drafts: bool) -> None:
        """max_rows: sequences that a forward may hold. drafts: the model proposes tokens."""
