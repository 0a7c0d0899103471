"""The interface of an attention path. `ModelRunner` checks rows and reserves blocks; a path computes the forward.

* `fused`: a forward of our own in C++, on a CPU, for the classes of most drafts and targets.
* `flash`: the paged path on a GPU, with flash attention and CUDA graphs.
* `paged`: transformers' modules over packed tokens, with our attention and a block table.
* `dense`: transformers' modules and attention over rows gathered from the blocks; for every model that transformers
  runs with a cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

from outrider.engine.step_plan import Row

BLOCK_SIZE = 16
"""Number of tokens in a block, for paths that need no other size. The C++ kernels are compiled for it."""
NORMED = -1
"""Index of the tap after the final norm: the hidden states that the model's lm_head reads."""


class ForwardPath(Protocol):
    """Attention path: runs a model's forward over rows, with keys and values in blocks of its own storage."""

    name: str
    """Name of the path in the log, in GetInfo and in benchmarks: fused, flash, paged or dense."""
    batch_invariant: bool
    """Whether a token's logits have the same bits whatever else is in the forward and however the token's row was
    divided into steps."""
    block_size: int
    """Number of tokens in a block of the path's storage."""

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes that one token takes in all layers: keys, values and anything else that a layer keeps. It may be 0
        before the first forward.
        """

    def set_storage(self, num_blocks: int, block_size: int) -> None:
        """Replace the storage by an empty one of `num_blocks` blocks and the trash block, each of `block_size` tokens.
        Raises torch's errors if there is too little memory.
        """

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy blocks in every layer. copies: pairs (from, to) of block numbers. Needed before a table writes into a
        block that other tables use.
        """

    def forward(self, rows: Sequence[Row]) -> Tensor:
        """Run the model over the rows' new tokens, and write their keys and values. Return the requested logits
        [sum(num_logits), V] float32 in the order of the rows.

        The caller has checked the rows and reserved blocks for them in their block tables. Raises InvalidRequest for a
        token id outside the vocabulary. Called in inference mode, on the engine thread.
        """


@runtime_checkable
class TreePath(Protocol):
    """Attention path whose rows may be token trees (`Row.parents`), if the model passes the self-test of trees."""

    def move_tokens(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """Move all that a layer keeps of the tokens at `sources` to `destinations`, in every layer.

        Both are storage indices: block * block_size + offset. A destination may also be a source: all sources are read
        before any destination is written.
        """


@runtime_checkable
class FeaturePath(Protocol):
    """Attention path that returns the model's hidden states, if the model passes the self-test of hidden states.

    Tap k from 0 to num_layers - 1 is the input of decoder layer k, tap num_layers the output of the last layer, and
    NORMED that output after the final norm.
    """

    def set_taps(self, taps: Sequence[int]) -> None:
        """Set which hidden states later forwards return in `features`. `taps`: their indices, as the class describes
        them; empty = no hidden states.

        Without taps a forward costs nothing more, except in a CUDA graph that was captured with taps.
        """

    @property
    def features(self) -> Tensor:
        """Hidden states of the last forward at the taps, [sum(num_new), taps, hidden], on the model's device.

        There is one entry for each new token of each row, in order, whether or not its logits were requested. The taps
        are in the order in which they were set; without taps the tensor has no entries. The dtype is float32 on `fused`
        and the model's on other paths. A later forward makes a new tensor and does not change this one.
        """


@runtime_checkable
class RepackedPath(Protocol):
    """Attention path with its own copy of the weights. The model's modules may be dropped once the path is created."""

    @property
    def weights_bytes(self) -> int:
        """Size of the path's weights in bytes. An embedding with the same values as the lm_head counts twice if both
        are kept.
        """


@runtime_checkable
class PreparedPath(Protocol):
    """Attention path with work to do between the load and the first request, after its storage is set."""

    def prepare(self, max_rows: int, context_limit: int) -> None:
        """Do the work between the load and the first request, such as capturing CUDA graphs.

        max_rows: maximum number of rows of a forward. context_limit: maximum number of tokens of a row.
        """
