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
    """Whether a token's logits have the same bits whatever other rows are in the forward, and in however many steps the
    tokens before it were fed."""
    block_size: int
    """Number of tokens in a block of the path's storage."""

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes that one token takes in all layers: keys, values and anything else that a layer keeps. It may be 0
        before the first forward.
        """

    def set_storage(self, num_blocks: int, block_size: int) -> None:
        """Replace the path's KV storage by an empty one of `num_blocks` blocks and the trash block, each of
        `block_size` tokens. Raises torch's errors if there is too little memory.
        """

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy blocks of the KV storage to other blocks, in every layer. copies: pairs (from, to) of block numbers. A
        block that several block tables share must be copied before one of these sequences writes into it.
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

    def move_tokens(self, from_indices: Sequence[int], to_indices: Sequence[int]) -> None:
        """Move all that the layers keep of some tokens to other places of the KV storage, in every layer.

        `from_indices`, `to_indices`: the old and the new storage index (block * block_size + offset) of each token. An
        index may be in both: all tokens are read before any is written.
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
    """Attention path with its own copy of the weights, so that the model's modules may be dropped once the path is
    created.
    """

    @property
    def weights_bytes(self) -> int:
        """Size in bytes of the path's copy of the weights. With tied weights, the embedding and the lm_head both count
        if the path stores both.
        """


@runtime_checkable
class PreparedPath(Protocol):
    """Attention path that needs preparation, such as the capture of CUDA graphs, after its storage is set and before
    the first request.
    """

    def prepare(self, max_rows: int, context_limit: int) -> None:
        """Prepare the path for requests, for example by capturing CUDA graphs.

        max_rows: maximum number of rows (sequences) of a forward. context_limit: maximum number of tokens of a row,
        cached and new.
        """
