"""Run a model over ragged rows: pieces of prompts, single tokens and K+1 positions to verify, in the same call.

Made by `loader.load_runner`, owned by the engine thread. It knows blocks and logits; slots are its callers' business,
and how a forward is computed is that of its path (`outrider.engine.attention`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from outrider.engine.attention.forward_path import NORMED, ForwardPath, GivesFeatures, RunsTrees
from outrider.engine.attention.module_taps import decoder_layers
from outrider.engine.host_copy import Moment
from outrider.engine.kv_pool import BlockTable, KVPool
from outrider.engine.memory import Spare
from outrider.engine.model_facts import ModelFacts
from outrider.engine.step_plan import Row, Source
from outrider.engine.token_tree import check_parents, check_path, positions
from outrider.wire.errors import InvalidRequest


class ModelRunner:
    """A model in eval mode with its KV cache."""

    def __init__(self, path: ForwardPath, facts: ModelFacts, pool: KVPool, device: torch.device) -> None:
        self.facts = facts
        self.path = path
        self.device = device
        self._began = self._ended = Moment(device)  # of the last forward
        self.tree_refusal: str | None = "nobody has tried it"
        """Why no row may be a token tree; None when rows may. `attention_choice` sets it after the self-test."""
        self.features_refusal: str | None = "nobody has tried it"
        """Why hidden states may not be tapped; None when they may, as tree_refusal."""
        self.self_test_error = math.inf
        """Largest logit difference in the self-test, as a share of the largest logit; `attention_choice` sets it."""
        self.num_weight_bytes = 0
        """As the path holds the weights; `loader.load_runner` sets it."""
        self.spare = Spare()
        """Memory for heads; none until `cache_size.size_cache` has counted it."""
        self.set_pool(pool)

    def set_pool(self, pool: KVPool) -> None:
        """Replace the cache by an empty one. Tables of the old pool must not be used any more."""
        self.pool = pool
        self.path.set_storage(pool.num_blocks, pool.block_size)

    def allocate(self) -> None:
        """Make the cache's storage now; without this the first request would. Raises what torch raises for memory.

        A layer's shape may be known only when keys of its own reach it, so one token goes through the model.
        """
        table, across = self.pool.new_table(), self.pool.new_table()
        if self.facts.decoder_start_ids:
            self.forward([Row(table, (), 0, 0, (), source=Source(across, [0]))])
        else:
            self.forward([Row.of(table, [0], 0, 1)])
        table.free()
        across.free()

    @property
    def supports_trees(self) -> bool:
        return self.tree_refusal is None

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes that one token takes in all layers; 0 before the first forward."""
        return self.path.kv_bytes_per_token

    @torch.inference_mode()
    def forward(self, rows: Sequence[Row]) -> Tensor:
        """Feed the rows and return the wanted logits [sum(num_logits), V] float32, rows in order, an inference tensor.

        Reserves blocks for the new tokens, and for sources that are to be encoded, and writes their KV. Raises
        OutOfBlocks, or InvalidRequest for a token id outside the vocabulary, a row past the context limit or a tree
        where trees are not run; every table is then as it was.
        """
        self._check(rows)
        try:
            self._reserve(rows)
            self._began = Moment(self.device)
            logits = self.path.forward(rows)
            self._ended = Moment(self.device)
            return logits
        except BaseException:
            for row in rows:
                row.table.truncate(row.num_cached)
                if row.source is not None and not row.new_ids:
                    row.source.table.free()
            raise

    def set_taps(self, taps: Sequence[int]) -> None:
        """Tap these hidden states in the forwards that follow, and no others (see `GivesFeatures`).

        Raises InvalidRequest for a tap that the model does not have, and for any where they cannot be had.
        """
        num_layers = self.facts.num_layers
        bad = next((tap for tap in taps if not (0 <= tap <= num_layers or tap == NORMED)), None)
        if bad is not None:
            raise InvalidRequest(
                f"tap {bad} is outside the layers of {self.facts.name}: taps are 0 to {num_layers}, "
                f"and {NORMED} for after the final norm",
                param="taps",
            )
        if taps and self.features_refusal is not None:
            raise InvalidRequest(
                f"the {self.path.name} path of {self.facts.name} gives no features: {self.features_refusal}; "
                "use a draft that reads none, or another attention_path",
                param="taps",
            )
        if isinstance(self.path, GivesFeatures):
            self.path.set_taps(taps)

    @property
    def features(self) -> Tensor:
        """Hidden states of the last forward [sum(num_new), taps, hidden], as `GivesFeatures.features`."""
        assert isinstance(self.path, GivesFeatures), "nothing is tapped"
        return self.path.features

    def forward_s(self) -> float:
        """Return the seconds that the device took for the last forward; wait until it is through."""
        return self._ended.seconds_since(self._began)

    @torch.inference_mode()
    def compact(self, row: Row, path: Sequence[int]) -> None:
        """Keep only the nodes of `path`, of the token tree that `row` fed last, as if they had been fed as a chain.

        path: nodes, as row.parents counts them, each of which follows the one before it and the first of which follows
        the token before the tree; empty to keep none. The table then has row.tree_start + len(path) tokens. What other
        tables read stays as it is. Raises OutOfBlocks when that takes a copy and there is no room, changing nothing.
        """
        assert row.parents is not None and isinstance(self.path, RunsTrees), "no token tree"
        assert row.table.num_tokens == row.num_tokens, f"{row.table.num_tokens} stored, {row.num_tokens} claimed"
        check_path(row.parents, path)
        self.rebase(row.table, row.tree_start, path)

    @torch.inference_mode()
    def rebase(self, table: BlockTable, start: int, keep: Sequence[int]) -> None:
        """Keep, of the tokens stored after `start`, those at the ascending indices `keep`, moved together behind it.

        What is before `start` is neither read nor written. Positions are not part of what is stored. What other tables
        read stays as it is. Raises OutOfBlocks when that takes a copy and there is no room, changing nothing.
        """
        moves = [(start + node, start + place) for place, node in enumerate(keep) if node != place]
        if moves:
            assert isinstance(self.path, RunsTrees), "no token tree"
            copies = table.rewrite(moves[0][1], start + len(keep))
            if copies:
                self.path.copy_blocks(copies)
            sources, destinations = (table.storage_indices(tokens) for tokens in zip(*moves, strict=True))
            self.path.move_tokens(sources, destinations)
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
            num_tokens = row.num_tokens if row.parents is None else self._check_tree(row)
            if num_tokens > self.facts.context_limit:
                raise InvalidRequest(
                    f"a row of {num_tokens} tokens is past the context limit, {self.facts.context_limit}"
                )
            assert (row.source is not None) == bool(self.facts.decoder_start_ids), "an encoder's rows have sources"
            assert row.new_ids or row.source is not None, "a row without new tokens"
            if row.source is not None:
                self._check_source(row.source, is_encoded=bool(row.new_ids))

    def _check_source(self, source: Source, *, is_encoded: bool) -> None:
        num_stored = source.num_stored if is_encoded else 0
        assert source.table.num_tokens == num_stored, f"{source.table.num_tokens} stored, {num_stored} claimed"
        if not 1 <= len(source.ids) <= self.facts.context_limit:
            raise InvalidRequest(
                f"a source of {len(source.ids)} tokens, must have 1 to {self.facts.context_limit}, the context limit"
            )

    def _check_tree(self, row: Row) -> int:
        """Return the number of tokens in its longest chain, those before the tree included."""
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
    """The model as transformers runs it, without any cache of ours: the truth in every test."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    @torch.inference_mode()
    def forward(self, token_ids: Sequence[int], source_ids: Sequence[int] = ()) -> Tensor:
        """Return the logits [T, V] float32 at each of the T tokens. source_ids: of encoder-decoder models."""
        ids = torch.tensor([list(token_ids)], device=self._model.device)  # [1, T]
        if not source_ids:
            return self._model(input_ids=ids, use_cache=False).logits[0].float()
        source = torch.tensor([list(source_ids)], device=self._model.device)  # [1, S]
        return self._model(input_ids=source, decoder_input_ids=ids, use_cache=False).logits[0].float()

    @torch.inference_mode()
    def hidden_states(self, token_ids: Sequence[int]) -> Tensor:
        """Return what taps 0, 1, .. num_layers and NORMED are at each of the T tokens, [T, num_layers + 2, H] float32.

        All but the output of the last layer, which transformers does not give, are its own `output_hidden_states`.
        """
        ids = torch.tensor([list(token_ids)], device=self._model.device)  # [1, T]
        _, layers = decoder_layers(self._model)
        outputs: list[Any] = []
        hook = layers[-1].register_forward_hook(lambda module, args, output: outputs.append(output))
        try:
            *before, normed = self._model(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states
        finally:
            hook.remove()
        last = outputs[0] if isinstance(outputs[0], Tensor) else outputs[0][0]
        return torch.stack([*before, last, normed], dim=2)[0].float()
