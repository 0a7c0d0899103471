"""Test at load, with the real weights, that an attention path computes what the model computes without a KV cache.

Without this test a class that keeps state elsewhere, numbers positions in its own way or ignores the mask would
generate wrong text without any error. `attention_choice` runs the test on every path that it tries.
"""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import transformers
from torch import Tensor, nn

from outrider.engine.attention.forward_path import NORMED, FeaturePath
from outrider.engine.errors import PathUnavailable
from outrider.engine.files.model_files import first_line
from outrider.engine.kv_pool import BlockTable, KVPool
from outrider.engine.model_runner import ModelRunner, UncachedModel
from outrider.engine.step_plan import EncoderSource, Row

NUM_BLOCKS = 16
"""Number of blocks, of 16 tokens each, that the self-test needs: for three sequences, and for the sources of an
encoder-decoder model."""
TOLERANCE = {"float32": 2e-3, "float16": 3e-2, "bfloat16": 1.5e-1}
"""Largest error of a logit that the self-test allows, as a fraction of the largest logit, by the dtype of the weights.
A wrong position or mask gives an error of about 1."""


class ReferenceLogits:
    """Logits that transformers' own forward computes without a KV cache, with which the self-test compares. They are
    computed once for each sequence and kept.

    The self-test uses the same sequences each time. So a second self-test, after the weights are packed, still compares
    with the logits of the unpacked weights.
    """

    def __init__(self, model: UncachedModel) -> None:
        self._model = model
        self._logits: dict[tuple[tuple[int, ...], ...], Tensor] = {}

    def forward(self, token_ids: Sequence[int], source_ids: Sequence[int] = ()) -> Tensor:
        """Return the logits [T, V] float32 of a sequence. source_ids: token ids of the source, for an encoder-decoder
        model.

        Raises PathUnavailable if transformers itself does not run the model.
        """
        key = (tuple(token_ids), tuple(source_ids))
        if key not in self._logits:
            try:
                self._logits[key] = self._model.forward(token_ids, source_ids)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # whatever a class does with a dtype or a device that it does not know
                why = f"{type(error).__name__}: {first_line(error)}"
                raise PathUnavailable(f"transformers {transformers.__version__} does not run it: {why}") from error
        return self._logits[key]

    def hidden_states(self, token_ids: Sequence[int]) -> Tensor:
        """Return the hidden states [T, taps, d] float32 of a sequence at all taps, computed without a KV cache."""
        return self._model.hidden_states(token_ids)


def random_ids(generator: random.Random, vocab_size: int, num_ids: int) -> list[int]:
    """Return `num_ids` token ids, drawn uniformly from a vocabulary of `vocab_size`."""
    return [generator.randrange(vocab_size) for _ in range(num_ids)]


def _encode_sources(
    runner: ModelRunner, lengths: Sequence[int], generator: random.Random
) -> list[EncoderSource | None]:
    """Return a source of each length, encoded; for a decoder-only model as many None."""
    if not runner.facts.decoder_start_ids:
        return [None] * len(lengths)
    sources = []
    for length in lengths:
        sources.append(EncoderSource(runner.pool.new_table(), random_ids(generator, runner.facts.vocab_size, length)))
    runner.forward([Row(runner.pool.new_table(), (), 0, 0, (), source=source) for source in sources])
    return list(sources)


def _free(*parts: BlockTable | EncoderSource | None) -> None:
    for part in parts:
        if isinstance(part, EncoderSource):
            part.table.free()
        elif part is not None:
            part.free()


def _reference_logits(
    model: UncachedModel | ReferenceLogits, ids: Sequence[int], source: EncoderSource | None
) -> Tensor:
    if source is None:
        return model.forward(ids, ())  # [T, V] float32
    return model.forward(ids, source.ids)


@dataclass
class _Sequence:
    """Tokens of one sequence, and how many of them the KV cache holds."""

    runner: ModelRunner
    ids: list[int]
    table: BlockTable
    source: EncoderSource | None
    num_cached: int = 0

    def row(self, end: int, num_logits: int) -> Row:
        return Row.of(self.table, self.ids[:end], self.num_cached, num_logits, self.source)

    def begin_with(self, other: _Sequence, num_tokens: int) -> None:
        # A hit of the prefix cache, and a rollback into the last of its blocks, which the next write then copies.
        prefix = self.runner.pool.prefix
        prefix.publish(other.table, other.ids)
        self.ids[:num_tokens] = other.ids[:num_tokens]
        prefix.adopt(self.table, other.ids[:-1])
        self.table.truncate(num_tokens)
        self.num_cached = self.table.num_tokens

    def rewrite(self, num_kept: int, generator: random.Random) -> None:
        # As after a rejection: the tokens behind `num_kept` leave the cache, and others take their places.
        self.table.truncate(num_kept)
        self.num_cached = min(self.num_cached, num_kept)
        num_new = len(self.ids[num_kept:])
        self.ids[num_kept:] = random_ids(generator, self.runner.facts.vocab_size, num_new)


Observer = Callable[[Row, Tensor, Tensor], None]
"""Function that the self-test calls with each row of a step, the row's logits [num_logits, V] float32 and its hidden
states [num_new, taps, d]."""


def largest_error(runner: ModelRunner, model: UncachedModel | ReferenceLogits) -> float:
    """Test the runner: prefill, decode, verify, share prefixes and roll back in batches of rows of different length.

    Returns the largest difference of a logit from `model`'s, as a fraction of the largest logit; NaN if any logit is
    NaN. The runner's pool must have NUM_BLOCKS blocks free. Errors that the model raises pass through.
    """
    errors: list[float] = []

    def compare(row: Row, logits: Tensor, _features: Tensor) -> None:
        if row.num_logits:
            ids = row.last_ids(row.num_tokens)
            reference = _reference_logits(model, ids, row.source)[-row.num_logits :]  # [num_logits, V] float32
            errors.append(relative_error(logits, reference))

    _run_sequences(runner, compare)
    return _largest(errors)


def _run_sequences(runner: ModelRunner, observe: Observer) -> None:
    generator = random.Random(0)
    longest = min(48, runner.facts.context_limit)
    lengths = [longest, max(longest // 3, 8), max(longest // 2, 8)]
    sequences = []
    for length, source in zip(lengths, _encode_sources(runner, lengths[::-1], generator), strict=True):
        ids = random_ids(generator, runner.facts.vocab_size, length)
        sequences.append(_Sequence(runner, ids, runner.pool.new_table(), source))
    a, b, c = sequences

    def step(*feeds: tuple[_Sequence, int, int]) -> None:
        # feeds: sequence, how many of its tokens are fed by then, and how many of their last logits are computed
        rows = [sequence.row(end, num_logits) for sequence, end, num_logits in feeds]
        logits_of_rows = runner.forward(rows).split([row.num_logits for row in rows])
        features_of_rows = [torch.empty(0)] * len(rows)
        if isinstance(runner.path, FeaturePath) and len(runner.features):
            features_of_rows = list(runner.features.split([row.num_new for row in rows]))
        for (sequence, _, _), row, logits, features in zip(feeds, rows, logits_of_rows, features_of_rows, strict=True):
            sequence.num_cached = row.num_tokens
            observe(row, logits, features)

    with torch.inference_mode():
        step((a, len(a.ids) - 7, 0), (b, len(b.ids) - 6, 1))  # two prompts of different length
        if a.source is None:  # prefixes of different sources are not shared
            c.begin_with(a, min(13, len(c.ids) - 8))
        end = len(c.ids) - 6
        third = (c, end, end - c.num_cached)
        step((a, len(a.ids) - 1, 6), (b, len(b.ids) - 5, 1), third)  # verify, decode, prefill behind a shared prefix
        a.rewrite(len(a.ids) - 5, generator)  # one of five draft tokens is accepted
        step((a, len(a.ids) - 4, 1), (b, len(b.ids), 5), (c, len(c.ids) - 4, 2))
        b.rewrite(len(b.ids) - 4, generator)
        step((b, len(b.ids), 4))  # alone
        a.rewrite(len(a.ids) - 6, generator)
        step((a, len(a.ids) - 5, 1))  # steps without draft tokens, by themselves, before a long one
        step((a, len(a.ids) - 4, 1))
        step((a, len(a.ids), 4))
    for sequence in (a, b, c):
        _free(sequence.table, sequence.source)


def layer_that_raised(error: BaseException) -> int | None:
    """Return the index of the decoder layer in whose forward the error was raised; None if no layer raised it."""
    layer = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module = frame.f_locals.get("self")
        index = getattr(module, "layer_idx", None)
        if isinstance(module, nn.Module) and isinstance(index, int):
            layer = index
    return layer


def layer_that_differs(runner: ModelRunner, model: UncachedModel | ReferenceLogits) -> int | None:
    """Run the sequences of the self-test again. Return the index of the first decoder layer whose output differs from
    the output in transformers' own forward.

    Returns None if no layer differs, or if outputs cannot be compared: on an attention path that gives no hidden
    states, in an encoder-decoder model, or after an error. The runner's pool is replaced.
    """
    if not isinstance(runner.path, FeaturePath) or runner.facts.decoder_start_ids:
        return None
    distances: list[Tensor] = []  # [num_layers + 1] each

    def compare(row: Row, _logits: Tensor, features: Tensor) -> None:
        reference = model.hidden_states(row.last_ids(row.num_tokens))[-row.num_new :, :-1]  # [num_new, taps, d]
        distances.append(_distances(features.float(), reference).amax(dim=0))

    try:
        runner.set_pool(KVPool(NUM_BLOCKS, runner.path.block_size))
        runner.path.set_taps(range(runner.facts.num_layers + 1))
        _run_sequences(runner, compare)
    except Exception:  # whatever the class does with its layers: the caller has an error to report already
        return None
    finally:
        runner.path.set_taps([])
        runner.set_pool(KVPool(NUM_BLOCKS, runner.path.block_size))
    is_right = torch.stack(distances).amax(dim=0) <= TOLERANCE[runner.facts.dtype]  # [num_layers + 1] bool
    wrong_taps = (~is_right).nonzero().flatten().tolist()
    if not wrong_taps or wrong_taps[0] == 0:  # tap 0 is the embedding
        return None
    return int(wrong_taps[0]) - 1  # tap k is the output of layer k - 1


PARENTS = (-1, 0, 0, 2, 1, 3, 2)
"""Index of the parent node of each node of the self-test's tree; -1 = the token before the tree. Some nodes are
siblings: they have one position, and each its own storage index. The tree is fed in two forwards, of 4 and of 3
nodes."""
PATHS = ((0, 2, 3, 5), (0, 1, 4))
"""Paths from the root on which the self-test compares logits, as indices of nodes in PARENTS. The test accepts the
first path, which moves two of its nodes in the cache."""


def largest_tree_error(runner: ModelRunner, model: UncachedModel | ReferenceLogits) -> float:
    """Test draft trees: feed a tree in two forwards, in a batch with a chain, accept a path of it and decode one token
    after it.

    Returns the largest difference of a logit from `model`'s, as a fraction of the largest logit; NaN if any logit is
    NaN. The runner's pool must have NUM_BLOCKS blocks free. Errors that the model raises pass through.
    """
    generator = random.Random(1)
    ids = random_ids(generator, runner.facts.vocab_size, 9 + len(PARENTS) + 1)
    prompt, nodes, last = ids[:9], ids[9:-1], ids[-1]
    num_first = 4
    table, other_table = runner.pool.new_table(), runner.pool.new_table()
    source, other_source = _encode_sources(runner, (11, 5), generator)
    try:
        runner.forward([Row.of(table, prompt, 0, 0, source), Row.of(other_table, ids[:6], 0, 0, other_source)])
        first = Row(table, nodes[:num_first], 9, num_first, prompt, PARENTS[:num_first], source=source)
        fed = [*prompt, *nodes[:num_first]]
        second = Row(table, nodes[num_first:], len(fed), 3, fed, PARENTS, source=source)
        logits = runner.forward([first, Row.of(other_table, ids[:8], 6, 0, other_source)])  # [4, V] float32
        logits = torch.cat([logits, runner.forward([second])])  # [7, V] float32
        runner.compact(second, PATHS[0])
        chain = [*prompt, *_tokens_on(PATHS[0], nodes), last]
        next_logits = runner.forward([Row.of(table, chain, len(chain) - 1, 1, source)])  # [1, V] float32
    finally:
        _free(table, other_table, source, other_source)
    reference = _reference_logits(model, chain, source)[9:]
    errors = [relative_error(torch.cat([logits[list(PATHS[0])], next_logits]), reference)]
    reference = _reference_logits(model, [*prompt, *_tokens_on(PATHS[1], nodes)], source)[9:]
    errors.append(relative_error(logits[list(PATHS[1])], reference))
    return _largest(errors)


def _tokens_on(path: Sequence[int], nodes: Sequence[int]) -> list[int]:
    return [nodes[node] for node in path]


def largest_feature_error(runner: ModelRunner, model: UncachedModel) -> float:
    """Test hidden states: compare those that the runner gives for pieces of prompts, verified rows and a draft tree
    with the hidden states in transformers' own forward.

    Returns the largest distance of a hidden state from transformers' own, as a fraction of the length of that vector;
    NaN if any number is NaN. All taps are compared. The runner's pool must have NUM_BLOCKS blocks free. Errors that the
    model raises pass through.
    """
    generator = random.Random(2)
    vocab_size = runner.facts.vocab_size
    a = random_ids(generator, vocab_size, 9)
    b = random_ids(generator, vocab_size, 5)
    nodes = random_ids(generator, vocab_size, len(PARENTS))
    first, second = runner.pool.new_table(), runner.pool.new_table()
    paths: Sequence[Sequence[int]] = [()]
    steps = [
        [Row.of(first, a[:5], 0, 0), Row.of(second, b[:3], 0, 1)],  # a piece of a prompt and a whole one
        [Row.of(second, b[:4], 3, 1), Row.of(first, a, 5, 4)],  # a decode and a verify
    ]
    if runner.supports_trees:
        steps.append([Row(first, nodes, len(a), 1, a, PARENTS), Row.of(second, b, 4, 1)])
        paths = PATHS
    features_of: dict[int, list[Tensor]] = {id(first): [], id(second): []}
    runner.set_taps([*range(runner.facts.num_layers + 1), NORMED])
    try:
        for rows in steps:
            runner.forward(rows)
            for row, features in zip(rows, runner.features.split([row.num_new for row in rows]), strict=True):
                features_of[id(row.table)].append(features.float())
    finally:
        runner.set_taps([])
        first.free()
        second.free()
    features_a = torch.cat(features_of[id(first)])  # [T, taps, d] float32
    features_b = torch.cat(features_of[id(second)])  # [T, taps, d] float32
    errors = [_distances(features_b, model.hidden_states(b)[: len(features_b)]).max()]
    for path in paths:
        reference = model.hidden_states([*a, *_tokens_on(path, nodes)])  # [T, taps, d] float32
        positions = [*range(len(a)), *(len(a) + node for node in path)]
        errors.append(_distances(features_a[positions], reference).max())
    return float(torch.stack(errors).max())  # NaN where any is


def _distances(features: Tensor, reference: Tensor) -> Tensor:
    # both [T, taps, d]; returns [T, taps], the length of each difference over that of the reference
    tiny = torch.finfo(reference.dtype).tiny  # embeddings may be 0
    lengths = torch.linalg.vector_norm(reference, dim=-1).clamp_min(tiny)  # [T, taps]
    return torch.linalg.vector_norm(features - reference, dim=-1) / lengths


def _largest(errors: Sequence[float]) -> float:
    """Return the largest error; NaN where one of them is, which `max` would pass over."""
    return float(torch.tensor(errors, dtype=torch.float64).max())


def relative_error(logits: Tensor, reference: Tensor) -> float:
    """Return the largest difference between the tensors, each [T, V], as a fraction of the largest number in
    `reference`; NaN if any number is NaN.
    """
    return float((logits - reference).abs().max() / reference.abs().max())
