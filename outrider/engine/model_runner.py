"""Run one forward of a model over rows of different lengths: prefill, decode and verify rows in the same call.

A `ModelRunner` is created by `loader.load_runner` and owned by the engine thread. It checks the rows and reserves their
blocks. The code that uses it holds the slots, and its attention path (`outrider.engine.attention`) computes the
forward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from outrider.engine.attention.forward_path import NORMED, FeaturePath, ForwardPath, TreePath
from outrider.engine.attention.module_taps import decoder_layers
from outrider.engine.host_copy import DeviceMoment
from outrider.engine.kv_pool import BlockTable, KVPool
from outrider.engine.memory import SpareMemory
from outrider.engine.model_facts import ModelFacts
from outrider.engine.step_plan import EncoderSource, Row
from outrider.engine.token_tree import check_parents, check_path, positions
from outrider.wire.errors import InvalidRequest


class ModelRunner:
    """Runner of a model's forwards on its KV cache. The model is in eval mode."""

    def __init__(self, path: ForwardPath, facts: ModelFacts, pool: KVPool, device: torch.device) -> None:
        self.facts = facts
        self.path = path
        self.device = device
        self._began = self._ended = DeviceMoment(device)  # of the last forward
        self.tree_refusal: str | None = "nobody has tried it"
        """Reason why rows may not be token trees; None if they may. `attention_choice` sets it after the self-test."""
        self.features_refusal: str | None = "nobody has tried it"
        """Reason why hidden states may not be tapped; None if they may. `attention_choice` sets it."""
        self.self_test_error = math.inf
        """Largest error of a logit in the self-test of the attention path, as a fraction of the largest logit.
        `attention_choice` sets it."""
        self.num_weight_bytes = 0
        """Size in bytes of the weights as the attention path keeps them. `loader.load_runner` sets it."""
        self.spare = SpareMemory()
        """Device memory that is left for heads beside the model and its KV cache; 0 bytes until `cache_size.size_cache`
        has computed it."""
        self.set_pool(pool)

    def set_pool(self, pool: KVPool) -> None:
        """Replace the KV cache by an empty one of this pool's size. Tables of the old pool must no longer be used."""
        self.pool = pool
        self.path.set_storage(pool.num_blocks, pool.block_size)

    def allocate(self) -> None:
        """Allocate the KV cache's storage now, instead of at the first request. Raises torch's errors if there is too
        little memory.

        One token is fed to the model, since the shape of a layer's keys may be known only when its first keys are
        written.
        """
        table = self.pool.new_table()
        source_table = self.pool.new_table()
        if self.facts.decoder_start_ids:
            self.forward([Row(table, (), 0, 0, (), source=EncoderSource(source_table, [0]))])
        else:
            self.forward([Row.of(table, [0], 0, 1)])
        table.free()
        source_table.free()

    @property
    def supports_trees(self) -> bool:
        """Whether the new tokens of a row may form a token tree, in which several tokens follow the same one."""
        return self.tree_refusal is None

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of KV cache that one token takes in all layers; 0 before the first forward."""
        return self.path.kv_bytes_per_token

    @torch.inference_mode()
    def forward(self, rows: Sequence[Row]) -> Tensor:
        """Run one forward over the rows. Return the logits of each row's last `num_logits` tokens,
        [sum(num_logits), V] float32 in the order of the rows, as an inference tensor.

        Reserves blocks for the new tokens and for sources that are to be encoded, and writes their keys and values.
        Raises OutOfBlocks if there are too few. Raises InvalidRequest for a token id outside the vocabulary, for a row
        longer than the context limit, and for a tree if `supports_trees` is false. After an error every table is as it
        was before.
        """
        self._check(rows)
        try:
            self._reserve(rows)
            self._began = DeviceMoment(self.device)
            logits = self.path.forward(rows)
            self._ended = DeviceMoment(self.device)
            return logits
        except BaseException:
            for row in rows:
                row.table.truncate(row.num_cached)
                if row.source is not None and not row.new_ids:
                    row.source.table.free()
            raise

    def set_taps(self, taps: Sequence[int]) -> None:
        """Choose the hidden states that later forwards return in `features`; an empty `taps` chooses none. Tap k is the
        input of decoder layer k, tap num_layers the output of the last layer, and tap NORMED that output after the
        final norm.

        Raises InvalidRequest for a tap that the model does not have, and for any tap if `features_refusal` is set.
        """
        num_layers = self.facts.num_layers
        for tap in taps:
            if not 0 <= tap <= num_layers and tap != NORMED:
                raise InvalidRequest(
                    f"tap {tap} is outside the layers of {self.facts.name}: taps are 0 to {num_layers}, "
                    f"and {NORMED} for after the final norm",
                    param="taps",
                )
        if taps and self.features_refusal is not None:
            raise InvalidRequest(
                f"the {self.path.name} path of {self.facts.name} gives no features: {self.features_refusal}; "
                "use a draft that reads none, or another attention_path",
                param="taps",
            )
        if isinstance(self.path, FeaturePath):
            self.path.set_taps(taps)

    @property
    def features(self) -> Tensor:
        """Tapped hidden states of all new tokens of the last forward, in the order of its rows: [sum(num_new), taps,
        d], on the model's device. float32 on the attention path `fused`, the model's dtype on others.
        """
        assert isinstance(self.path, FeaturePath), "nothing is tapped"
        return self.path.features

    def forward_s(self) -> float:
        """Wait until the device has finished the last forward. Return the seconds that the forward took."""
        return self._ended.seconds_since(self._began)

    @torch.inference_mode()
    def compact(self, row: Row, path: Sequence[int]) -> None:
        """Of the token tree that `row` fed last, keep only the nodes of `path`. The cache is then as if they had been
        fed as a chain.

        path: indices of nodes in row.parents, each the parent of the next, the first a child of the token before the
        tree; empty = no node is kept. The row's table then has the tokens before the tree and the nodes kept. Blocks
        that other tables use are copied before they are changed. Raises OutOfBlocks if a copy needs a block and none is
        free; then nothing is changed.
        """
        # tree_start 10, parents [-1, 0, 0, 2], path [0, 2]: token 12 moves to 11, and the table has 12 tokens
        assert row.parents is not None and isinstance(self.path, TreePath), "no token tree"
        assert row.table.num_tokens == row.num_tokens, f"{row.table.num_tokens} stored, {row.num_tokens} claimed"
        check_path(row.parents, path)
        self.rebase(row.table, row.tree_start, path)

    @torch.inference_mode()
    def rebase(self, table: BlockTable, start: int, keep: Sequence[int]) -> None:
        """Of the tokens that are stored from `start` on, keep those at the offsets `keep`, and move them together so
        that they begin at `start`. Offsets are counted from `start` and ascend.

        Tokens before `start` are neither read nor written. Keys and values are moved unchanged: a token keeps the
        position with which it was fed. Blocks that other tables use are copied before they are changed. Raises
        OutOfBlocks if a copy needs a block and none is free; then nothing is changed.
        """
        # start 10, keep [0, 2, 5]: tokens 12 and 15 move to 11 and 12, and the table has 13 tokens
        moved_from: list[int] = []
        moved_to: list[int] = []
        for offset, kept in enumerate(keep):
            if kept != offset:
                moved_from.append(start + kept)
                moved_to.append(start + offset)
        if moved_to:
            assert isinstance(self.path, TreePath), "no token tree"
            copies = table.rewrite(moved_to[0], start + len(keep))
            if copies:
                self.path.copy_blocks(copies)
            self.path.move_tokens(table.storage_indices(moved_from), table.storage_indices(moved_to))
        table.truncate(start + len(keep))

    def _reserve(self, rows: Sequence[Row]) -> None:
        copies: list[tuple[int, int]] = []
        try:
            for row in rows:
                copies += row.table.reserve(row.num_tokens)
                if row.source is not None and not row.new_ids:
                    row.source.table.reserve(row.source.num_stored)
        finally:  # also when memory runs out: the tables reserved before that hold their copies already
            if copies:
                self.path.copy_blocks(copies)

    def _check(self, rows: Sequence[Row]) -> None:
        assert len({id(row.table) for row in rows}) == len(rows), "a table may be in a forward only once"
        for row in rows:
            assert 0 <= row.num_logits <= row.num_new, f"{row.num_logits} logits of {row.num_new} new tokens"
            assert row.table.num_tokens == row.num_cached, f"{row.table.num_tokens} stored, {row.num_cached} claimed"
            num_tokens = row.num_tokens
            if row.parents is not None:
                num_tokens = self._check_tree(row)
            if num_tokens > self.facts.context_limit:
                raise InvalidRequest(
                    f"a row of {num_tokens} tokens is past the context limit, {self.facts.context_limit}"
                )
            assert (row.source is not None) == bool(self.facts.decoder_start_ids), "an encoder's rows have sources"
            assert row.new_ids or row.source is not None, "a row without new tokens"
            if row.source is not None:
                self._check_source(row.source, is_encoded=bool(row.new_ids))

    def _check_source(self, source: EncoderSource, *, is_encoded: bool) -> None:
        num_stored = 0
        if is_encoded:
            num_stored = source.num_stored
        assert source.table.num_tokens == num_stored, f"{source.table.num_tokens} stored, {num_stored} claimed"
        if not 1 <= len(source.ids) <= self.facts.context_limit:
            raise InvalidRequest(
                f"a source of {len(source.ids)} tokens, must have 1 to {self.facts.context_limit}, the context limit"
            )

    def _check_tree(self, row: Row) -> int:
        # Returns the length of the longest chain, the tokens before the tree included: it counts for the context limit.
        if self.tree_refusal is not None:
            raise InvalidRequest(
                f"the {self.path.name} path of {self.facts.name} runs no token trees: {self.tree_refusal}; "
                "draft chains",
                param="tree",
            )
        assert row.parents is not None and row.num_new <= len(row.parents) <= row.num_tokens, "nodes beside the tree"
        check_parents(row.parents)
        return 1 + int(positions(row.num_tokens, row.parents).max())


class UncachedModel:
    """Model that transformers runs without a KV cache. Self-tests and tests compare other forwards with it."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    @torch.inference_mode()
    def forward(self, token_ids: Sequence[int], source_ids: Sequence[int] = ()) -> Tensor:
        """Return the logits [T, V] float32 of T tokens. source_ids: tokens of an encoder-decoder model's source."""
        ids = torch.tensor([list(token_ids)], device=self._model.device)  # [1, T]
        if not source_ids:
            return self._model(input_ids=ids, use_cache=False).logits[0].float()
        source = torch.tensor([list(source_ids)], device=self._model.device)  # [1, S]
        return self._model(input_ids=source, decoder_input_ids=ids, use_cache=False).logits[0].float()

    @torch.inference_mode()
    def hidden_states(self, token_ids: Sequence[int]) -> Tensor:
        """Return the hidden states of T tokens at all taps, [T, num_layers + 2, d] float32: the inputs of the decoder
        layers, the output of the last layer, and that output after the final norm.
        """
        ids = torch.tensor([list(token_ids)], device=self._model.device)  # [1, T]
        _, layers = decoder_layers(self._model)
        outputs: list[Any] = []
        hook = layers[-1].register_forward_hook(lambda module, args, output: outputs.append(output))
        try:
            *before, normed = self._model(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states
        finally:
            hook.remove()
        last = outputs[0]
        if not isinstance(last, Tensor):  # a tuple, of which the hidden states are the first
            last = last[0]
        return torch.stack([*before, last, normed], dim=2)[0].float()
