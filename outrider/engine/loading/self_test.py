"""Test at load, with the real weights, that our cache computes what the model computes without one.

Without this test a class that keeps state elsewhere, takes positions in its own way or ignores the mask would give
wrong text without any error. `attention_choice` runs it on every path it tries.
"""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

from outrider.engine.attention.forward_path import NORMED, GivesFeatures
from outrider.engine.errors import PathUnavailable
from outrider.engine.files.model_files import first_line
from outrider.engine.kv_pool import BlockTable, KVPool
from outrider.engine.model_facts import ModelFacts
from outrider.engine.model_runner import ModelRunner, UncachedModel
from outrider.engine.step_plan import Row, Source

NUM_BLOCKS = 16
"""Blocks of 16 tokens: enough for the three sequences of the test, and their sources."""
TOLERANCE = {"float32": 2e-3, "float16": 3e-2, "bfloat16": 1.5e-1}
"""Largest logit difference allowed, as a share of the largest logit. A wrong position or mask gives about 1."""


class Remembered:
    """A model's logits without a cache, each sequence computed once.

    The self-test always uses the same sequences, so a second test, of a model whose weights were packed meanwhile,
    compares with the plain ones.
    """

    def __init__(self, model: UncachedModel) -> None:
        self._model = model
        self._known: dict[tuple[tuple[int, ...], ...], Tensor] = {}

    def forward(self, token_ids: Sequence[int], source_ids: Sequence[int] = ()) -> Tensor:
        """Return the logits [T, V] float32. Raises PathUnavailable where transformers itself does not run the model."""
        key = (tuple(token_ids), tuple(source_ids))
        if key not in self._known:
            try:
                self._known[key] = self._model.forward(token_ids, source_ids)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # whatever a class does with a dtype or a device that it does not know
                why = f"{type(error).__name__}: {first_line(error)}"
                raise PathUnavailable(f"transformers {transformers.__version__} does not run it: {why}") from error
        return self._known[key]

    def hidden_states(self, token_ids: Sequence[int]) -> Tensor:
        """As `UncachedModel.hidden_states`."""
        return self._model.hidden_states(token_ids)


def _sources(runner: ModelRunner, lengths: Sequence[int], generator: random.Random) -> list[Source | None]:
    """Return encoded sources, for rows of an encoder-decoder model; for those of any other, none."""
    if not runner.facts.decoder_start_ids:
        return [None] * len(lengths)
    vocab_size = runner.facts.vocab_size
    sources = [
        Source(runner.pool.new_table(), [generator.randrange(vocab_size) for _ in range(num)]) for num in lengths
    ]
    runner.forward([Row(runner.pool.new_table(), (), 0, 0, (), source=source) for source in sources])
    return list(sources)


def _free(*parts: BlockTable | Source | None) -> None:
    for part in parts:
        if part is not None:
            (part.table if isinstance(part, Source) else part).free()


def _truth(model: UncachedModel | Remembered, ids: Sequence[int], source: Source | None) -> Tensor:
    """Return the logits [T, V] float32."""
    return model.forward(ids, () if source is None else source.ids)


@dataclass
class _Sequence:
    """Tokens fed so far, in one table."""

    runner: ModelRunner
    ids: list[int]
    table: BlockTable
    source: Source | None
    num_cached: int = 0

    def row(self, end: int, num_logits: int) -> Row:
        return Row.of(self.table, self.ids[:end], self.num_cached, num_logits, self.source)

    def begin_with(self, other: _Sequence, num_tokens: int) -> None:
        """Begin with `other`'s first tokens, in its blocks where they are full: as a hit of the prefix cache and a
        rollback into the last of those blocks, which the next write then copies."""
        prefix = self.runner.pool.prefix
        prefix.publish(other.table, other.ids)
        self.ids[:num_tokens] = other.ids[:num_tokens]
        prefix.adopt(self.table, other.ids[:-1])
        self.table.truncate(num_tokens)
        self.num_cached = self.table.num_tokens

    def rewrite(self, keep: int, generator: random.Random) -> None:
        """Forget all but `keep` tokens and go on with others, as after a rejection."""
        self.table.truncate(keep)
        self.num_cached = min(self.num_cached, keep)
        self.ids[keep:] = [generator.randrange(self.runner.facts.vocab_size) for _ in self.ids[keep:]]


Look = Callable[[Row, Tensor, Tensor], None]
"""Takes a row of a step, its logits [num_logits, V] and its hidden states [num_new, taps, H]."""


def largest_error(runner: ModelRunner, model: UncachedModel | Remembered) -> float:
    """Prefill, decode, verify, share and roll back ragged rows; return the largest difference over the largest logit.

    Lets through whatever the model raises. The runner's pool must have NUM_BLOCKS free.
    """
    errors: list[float] = []

    def look(row: Row, logits: Tensor, features: Tensor) -> None:
        if row.num_logits:
            truth = _truth(model, row.last_ids(row.num_tokens), row.source)[-row.num_logits :]
            errors.append(_error(logits, truth))

    _run_course(runner, look)
    return _largest(errors)


def _run_course(runner: ModelRunner, look: Look) -> None:
    generator = random.Random(0)
    longest = min(48, runner.facts.context_limit)
    lengths = [longest, max(longest // 3, 8), max(longest // 2, 8)]
    vocab_size = runner.facts.vocab_size
    sources = _sources(runner, lengths[::-1], generator)
    a, b, c = (
        _Sequence(runner, [generator.randrange(vocab_size) for _ in range(n)], runner.pool.new_table(), source)
        for n, source in zip(lengths, sources, strict=True)
    )

    def step(*feeds: tuple[_Sequence, int, int]) -> None:
        rows = [sequence.row(end, num_logits) for sequence, end, num_logits in feeds]
        parts = runner.forward(rows).split([row.num_logits for row in rows])
        hidden = [torch.empty(0)] * len(rows)
        if isinstance(runner.path, GivesFeatures) and len(runner.features):
            hidden = list(runner.features.split([row.num_new for row in rows]))
        for (sequence, _, _), row, logits, features in zip(feeds, rows, parts, hidden, strict=True):
            sequence.num_cached = row.num_tokens
            look(row, logits, features)

    with torch.inference_mode():
        step((a, len(a.ids) - 7, 0), (b, len(b.ids) - 6, 1))  # two prompts of different length
        if a.source is None:  # or it would be another source's prefix
            c.begin_with(a, min(13, len(c.ids) - 8))
        end = len(c.ids) - 6
        joins = (c, end, end - c.num_cached)
        step((a, len(a.ids) - 1, 6), (b, len(b.ids) - 5, 1), joins)  # verify, decode, join
        a.rewrite(len(a.ids) - 5, generator)  # one of five drafts kept
        step((a, len(a.ids) - 4, 1), (b, len(b.ids), 5), (c, len(c.ids) - 4, 2))
        b.rewrite(len(b.ids) - 4, generator)
        step((b, len(b.ids), 4))  # alone
        a.rewrite(len(a.ids) - 6, generator)
        step((a, len(a.ids) - 5, 1))  # steps without drafts, by themselves, before a long one
        step((a, len(a.ids) - 4, 1))
        step((a, len(a.ids), 4))
    for sequence in (a, b, c):
        _free(sequence.table, sequence.source)


def layer_that_raised(error: BaseException) -> int | None:
    """Return the index of the decoder layer that the error was raised in; None where it was in none."""
    index = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module = frame.f_locals.get("self")
        found = getattr(module, "layer_idx", None)
        if isinstance(module, nn.Module) and isinstance(found, int):
            index = found
    return index


def layer_that_differs(runner: ModelRunner, model: UncachedModel | Remembered) -> int | None:
    """Return the index of the first decoder layer whose output is not transformers' in the course of `largest_error`;
    None where its hidden states cannot be had, or none differs. Replaces the pool.
    """
    if not isinstance(runner.path, GivesFeatures) or runner.facts.decoder_start_ids:
        return None
    distances: list[Tensor] = []  # [num_layers + 1] each

    def look(row: Row, logits: Tensor, features: Tensor) -> None:
        truth = model.hidden_states(row.last_ids(row.num_tokens))[-row.num_new :, :-1]  # [num_new, taps, H]
        distances.append(_distances(features.float(), truth).amax(dim=0))

    try:
        runner.set_pool(KVPool(NUM_BLOCKS, runner.path.block_size))
        runner.path.set_taps(range(runner.facts.num_layers + 1))
        _run_course(runner, look)
    except Exception:  # whatever the class does with its layers: the caller has an error to report already
        return None
    finally:
        runner.path.set_taps([])
        runner.set_pool(KVPool(NUM_BLOCKS, runner.path.block_size))
    is_right = torch.stack(distances).amax(dim=0) <= TOLERANCE[runner.facts.dtype]
    wrong = (~is_right).nonzero().flatten().tolist()
    return wrong[0] - 1 if wrong and wrong[0] else None


@torch.inference_mode()
def own_cache_refusal(model: PreTrainedModel, facts: ModelFacts) -> str | None:
    """Return what is wrong with the cache that transformers itself gives a class that failed the self-test, when
    several tokens are fed behind others, as drafts are; None where nothing is.

    Tokens recur, and the truth is of a longer text: some classes choose among keys whose scores are then equal.
    """
    generator = random.Random(3)
    few = [generator.randrange(facts.vocab_size) for _ in range(8)]
    longest = min(48, facts.context_limit)
    ids = torch.tensor([generator.choices(few, k=longest)], device=model.device)  # [1, T]
    begin, end = longest // 2, longest // 2 + 6
    tolerance = TOLERANCE[facts.dtype]
    name = "input_ids"
    inputs: dict[str, Tensor] = {}
    if facts.decoder_start_ids:
        name = "decoder_input_ids"
        inputs = {"input_ids": ids}
    try:
        truth = model(**inputs, **{name: ids}, use_cache=False).logits[0]  # [T, V]
        begun = model(**inputs, **{name: ids[:, :begin]}, use_cache=True)
        is_causal = _error(begun.logits[0], truth[:begin]) <= tolerance
        if not is_causal and getattr(model.config, "is_decoder", None) is False:
            return "it reads its text in both directions (is_decoder is false in config.json)"
        more = {name: ids[:, begin:end], "past_key_values": begun.past_key_values}
        logits = model(**inputs, **more, use_cache=True).logits[0]
        is_right = _error(logits, truth[begin:end]) <= tolerance
    except torch.OutOfMemoryError:
        raise
    except Exception:  # whatever the class does with it
        return "in transformers, too, its cache takes no several tokens at once behind others"
    if is_right:
        return None
    return "in transformers, too, several tokens fed behind its cache get other logits than without a cache"


PARENTS = (-1, 0, 0, 2, 1, 3, 2)
"""Parents of the tree that is tried: siblings, so that places in the cache are no positions; fed by 4 and 3 nodes."""
PATHS = ((0, 2, 3, 5), (0, 1, 4))
"""Paths whose logits are compared; when the first is kept, two of its nodes move."""


def largest_tree_error(runner: ModelRunner, model: UncachedModel | Remembered) -> float:
    """Feed a token tree in two parts beside a chain, keep a path and go on; return the error as `largest_error`.

    Lets through whatever the model raises. The runner's pool must have NUM_BLOCKS free.
    """
    generator = random.Random(1)
    ids = [generator.randrange(runner.facts.vocab_size) for _ in range(9 + len(PARENTS) + 1)]
    prompt, nodes, last = ids[:9], ids[9:-1], ids[-1]
    num_first = 4
    table, beside = runner.pool.new_table(), runner.pool.new_table()
    across, other = _sources(runner, (11, 5), generator)
    try:
        runner.forward([Row.of(table, prompt, 0, 0, across), Row.of(beside, ids[:6], 0, 0, other)])
        first = Row(table, nodes[:num_first], 9, num_first, prompt, PARENTS[:num_first], source=across)
        fed = [*prompt, *nodes[:num_first]]
        second = Row(table, nodes[num_first:], len(fed), 3, fed, PARENTS, source=across)
        logits = runner.forward([first, Row.of(beside, ids[:8], 6, 0, other)])  # [4, V]
        logits = torch.cat([logits, runner.forward([second])])  # [7, V]
        runner.compact(second, PATHS[0])
        chain = [*prompt, *(nodes[node] for node in PATHS[0]), last]
        after = runner.forward([Row.of(table, chain, len(chain) - 1, 1, across)])  # [1, V]
    finally:
        _free(table, beside, across, other)
    truth = _truth(model, chain, across)[9:]
    errors = [_error(torch.cat([logits[list(PATHS[0])], after]), truth)]
    truth = _truth(model, [*prompt, *(nodes[node] for node in PATHS[1])], across)[9:]
    errors.append(_error(logits[list(PATHS[1])], truth))
    return _largest(errors)


def largest_feature_error(runner: ModelRunner, model: UncachedModel) -> float:
    """Tap everything in pieces of prompts, verified rows and a token tree; return the largest difference of a hidden
    state from transformers' own, as a share of its length.

    All taps at once: in the middle of a deep model a layer changes little, and one too many or too few shows at the
    ends. Lets through whatever the model raises. The runner's pool must have NUM_BLOCKS free.
    """
    generator = random.Random(2)
    vocab_size = runner.facts.vocab_size
    a, b, nodes = ([generator.randrange(vocab_size) for _ in range(n)] for n in (9, 5, len(PARENTS)))
    first, second = runner.pool.new_table(), runner.pool.new_table()
    steps = [
        [Row.of(first, a[:5], 0, 0), Row.of(second, b[:3], 0, 1)],  # a piece of a prompt and a whole one
        [Row.of(second, b[:4], 3, 1), Row.of(first, a, 5, 4)],  # a decode and a verify
    ]
    if runner.supports_trees:
        steps.append([Row(first, nodes, len(a), 1, a, PARENTS), Row.of(second, b, 4, 1)])
    given: dict[int, list[Tensor]] = {id(first): [], id(second): []}
    runner.set_taps([*range(runner.facts.num_layers + 1), NORMED])
    try:
        for rows in steps:
            runner.forward(rows)
            for row, part in zip(rows, runner.features.split([row.num_new for row in rows]), strict=True):
                given[id(row.table)].append(part.float())
    finally:
        runner.set_taps([])
        first.free()
        second.free()
    of_a, of_b = (torch.cat(parts) for parts in given.values())  # [T, taps, H]
    errors = [_distance(of_b, model.hidden_states(b)[: len(of_b)])]
    for path in PATHS if runner.supports_trees else [()]:
        truth = model.hidden_states([*a, *(nodes[node] for node in path)])
        errors.append(_distance(of_a[[*range(len(a)), *(len(a) + node for node in path)]], truth))
    return float(torch.stack(errors).max())  # NaN where any is


def _distance(features: Tensor, truth: Tensor) -> Tensor:
    """Return the largest difference of two vectors as a share of the second's length; both [T, taps, H]."""
    return _distances(features, truth).max()


def _distances(features: Tensor, truth: Tensor) -> Tensor:
    """Return the differences [T, taps], as `_distance`."""
    lengths = torch.linalg.vector_norm(truth, dim=-1).clamp_min(torch.finfo(truth.dtype).tiny)  # embeddings may be 0
    return torch.linalg.vector_norm(features - truth, dim=-1) / lengths


def _largest(errors: Sequence[float]) -> float:
    """Return the largest; NaN where one of them is, which `max` would pass over."""
    return float(torch.tensor(errors, dtype=torch.float64).max())


def _error(logits: Tensor, truth: Tensor) -> float:
    return float((logits - truth).abs().max() / truth.abs().max())
