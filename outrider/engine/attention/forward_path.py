"""The interface of an attention path. `ModelRunner` checks rows and reserves blocks; a path computes the forward.

* `fused`: a forward of our own in C++, on a CPU, for the classes that most drafts and targets are of.
* `flash`: the paged path on a GPU, over flash attention, with CUDA graphs.
* `paged`: transformers' modules over packed tokens, with our attention and a block table.
* `dense`: transformers' modules and attention over rows gathered from the blocks; runs every model that transformers
  runs with a cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

from outrider.engine.step_plan import Row

BLOCK_SIZE = 16
"""Tokens in a block, for paths that need no other size. The C++ kernels are compiled for it."""
NORMED = -1
"""The tap after the final norm: the hidden states that the model's own head reads."""


class ForwardPath(Protocol):
    """Runs a model over rows, with keys and values in blocks of its own storage."""

    name: str
    """fused, flash, paged or dense: the name in the log, in GetInfo and in benchmarks."""
    batch_invariant: bool
    """Whether a token's logits have the same bits whatever else is in the forward and however its row was divided."""
    block_size: int
    """Tokens in a block of its storage."""

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes that one token takes in all layers: its KV, and whatever else a layer keeps. It may be 0 before the
        first forward.
        """

    def set_storage(self, num_blocks: int, block_size: int) -> None:
        """Replace the storage by an empty one of num_blocks blocks and the trash block. Raises what torch raises."""

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy blocks, (from, to) pairs, in every layer. Needed before a table writes into a block that others read."""

    def forward(self, rows: Sequence[Row]) -> Tensor:
        """Write the new tokens' KV; return their logits [sum(num_logits), V] float32, rows in order.

        The caller has checked the rows and reserved their tables. Raises InvalidRequest for a token id outside the
        vocabulary. Called in inference mode, on the engine thread.
        """


@runtime_checkable
class TreePath(Protocol):
    """A path whose rows may be token trees (`Row.parents`), if the model passes the self-test of trees."""

    def move_tokens(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """Move everything that a layer keeps of the tokens at `sources` to `destinations`, in every layer.

        Both are storage indices: block * block_size + offset. A destination may also be a source: all sources are read
        before any destination is written.
        """


@runtime_checkable
class FeaturePath(Protocol):
    """A path that returns the model's hidden states, if the model passes the self-test of features.

    Tap k of 0 to num_layers - 1 is the input of decoder layer k, tap num_layers the output of the last layer, and
    NORMED that output after the final norm.
    """

    def set_taps(self, taps: Sequence[int]) -> None:
        """Tap these hidden states in later forwards, and no others; empty to tap none.

        Without taps a forward costs nothing more, except a CUDA graph that was captured with some.
        """

    @property
    def features(self) -> Tensor:
        """Tapped hidden states of the last forward, [sum(num_new), taps, hidden], on the model's device.

        Those of all new tokens of all rows, in order, with or without logits; taps in the order in which they were set.
        No rows where nothing is tapped. float32 on `fused`, the model's dtype on other paths. A later forward replaces
        the tensor and does not change it.
        """


@runtime_checkable
class RepackedPath(Protocol):
    """A path with its own copy of the weights. The model's modules may be dropped once it is made."""

    @property
    def weights_bytes(self) -> int:
        """Bytes of the path's weights. An embedding that equals the head counts again where both are kept."""


@runtime_checkable
class PreparedPath(Protocol):
    """A path with work to do between load and the first request, once its storage is set."""

    def prepare(self, max_rows: int, context_limit: int) -> None:
        """Do that work, such as capturing CUDA graphs.

        max_rows: most rows of a forward. context_limit: most tokens of a row.
        """
