"""A fixed course of ragged prefills, decodes, verifies and rollbacks over a runner, against a forward without cache."""

import random
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from outrider.engine.kv_pool import BlockTable
from outrider.engine.model_runner import ModelRunner, UncachedModel
from outrider.engine.step_plan import EncoderSource, Row

Truth = Callable[..., Tensor]
"""[T] ids, and those of a source where there is an encoder -> [T, V] float32, from transformers alone."""


def some_ids(count: int, vocab_size: int, seed: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(1, vocab_size) for _ in range(count)]  # 0 is padding, that some classes pass over


def truth_of(model: PreTrainedModel) -> Truth:
    """Every distinct sequence is computed once."""
    uncached, known = UncachedModel(model), dict[tuple[tuple[int, ...], ...], Tensor]()

    def truth(ids: list[int], source_ids: Sequence[int] = ()) -> Tensor:
        key = (tuple(ids), tuple(source_ids))
        if key not in known:
            known[key] = uncached.forward(ids, source_ids)
        return known[key]

    return truth


def some_source(runner: ModelRunner, num_tokens: int, seed: int) -> EncoderSource | None:
    """An encoded source; None for a decoder-only model."""
    if not runner.facts.decoder_start_ids:
        return None
    source = EncoderSource(runner.pool.new_table(), some_ids(num_tokens, runner.facts.vocab_size, seed))
    runner.forward([Row(runner.pool.new_table(), (), 0, 0, (), source=source)])
    return source


def ids_of(source: EncoderSource | None) -> list[Sequence[int]]:
    """What a `Truth` takes of it."""
    return [] if source is None else [source.ids]


class Fed:
    """A sequence and the expectation for every logit it is asked for.

    relative: an error is a share of the largest logit.
    """

    def __init__(
        self, runner: ModelRunner, expected: Truth, ids: list[int], *, relative: bool = False, num_source: int = 3
    ) -> None:
        self.table, self.ids, self.num_cached = runner.pool.new_table(), ids, 0
        self.source = some_source(runner, num_source, len(ids))
        self._vocab_size = runner.facts.vocab_size
        self._expected = expected
        self._relative = relative

    def row(self, end: int, num_logits: int) -> Row:
        return Row.of(self.table, self.ids[:end], self.num_cached, num_logits, self.source)

    def free(self) -> None:
        self.table.free()
        if self.source is not None:
            self.source.table.free()

    def error(self, row: Row, logits: Tensor) -> float:
        self.num_cached = row.num_tokens
        if not row.num_logits:
            return 0.0
        expected = self._expected(row.last_ids(row.num_tokens), *ids_of(self.source))[-row.num_logits :]
        scale = expected.abs().max() if self._relative else 1.0
        return float((logits - expected).abs().max() / scale)

    def roll_back(self, keep: int, seed: int) -> None:
        self.table.truncate(keep)
        self.num_cached = keep
        self.ids = self.ids[:keep] + some_ids(max(60, len(self.ids) - keep), self._vocab_size, seed)


def step(runner: ModelRunner, feeds: list[tuple[Fed, int, int]]) -> float:
    """One forward of (sequence, its new end, logits wanted); the largest error."""
    rows = [sequence.row(end, num_logits) for sequence, end, num_logits in feeds]
    parts = runner.forward(rows).split([row.num_logits for row in rows])
    return max(sequence.error(row, logits) for (sequence, _, _), row, logits in zip(feeds, rows, parts, strict=True))


def largest_error(runner: ModelRunner, truth: Truth, *, relative: bool = False) -> float:
    """Four sequences of up to 64 tokens, through everything that a service does with rows. NaN if any logit is."""
    ids = [some_ids(110, runner.facts.vocab_size, seed) for seed in range(4)]
    a, b, c, d = (
        Fed(runner, truth, ids[seed], relative=relative, num_source=num_source)
        for seed, num_source in enumerate((50, 7, 1, 16))
    )
    steps = [
        [(a, 40, 0), (b, 9, 1), (c, 3, 1)],  # prompts: wide, narrow, very short
        [(a, 57, 1), (b, 10, 1), (c, 4, 1), (d, 20, 0)],  # the rest of a prompt among decodes, another joins
        [(a, 63, 6), (b, 16, 6), (c, 10, 6), (d, 21, 1)],  # verify K = 5, and one plain step
    ]
    errors = [step(runner, feeds) for feeds in steps]
    a.roll_back(58, 10)  # all refused
    b.roll_back(13, 11)  # two kept
    c.roll_back(5, 12)
    errors.append(step(runner, [(a, 64, 6), (b, 15, 2), (c, 6, 1), (d, 27, 6)]))  # ragged K
    d.free()  # leaves in between
    a.roll_back(16, 13)  # far back, to the edge of a block
    errors.append(step(runner, [(a, 17, 1), (b, 16, 1), (c, 12, 6)]))
    errors.append(step(runner, [(a, 23, 6)]))  # alone
    for sequence in (a, b, c):
        sequence.free()
    return float("nan") if any(error != error for error in errors) else max(errors)


class Grown:
    """A sequence that ends with a token tree, fed piece by piece. nodes: their ids, as many as parents."""

    def __init__(
        self,
        runner: ModelRunner,
        table: BlockTable,
        ids: list[int],
        nodes: list[int],
        parents: list[int],
        num_source: int = 3,
    ) -> None:
        self.source = some_source(runner, num_source, 25)
        self.table, self.ids, self.nodes, self.parents = table, ids, nodes, parents
        self._runner = runner

    def row(self, first: int, end: int) -> Row:
        """Feeds nodes `first` to end - 1, with all logits; what is before them is cached."""
        cached = [*self.ids, *self.nodes[:first]]
        return Row(
            *(self.table, self.nodes[first:end], len(cached), end - first, cached, self.parents[:end]),
            source=self.source,
        )

    def path_to(self, node: int) -> list[int]:
        """Its ancestors and itself."""
        path = []
        while node >= 0:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    def chain_to(self, node: int) -> list[int]:
        """Token ids of the chain that ends with a node."""
        return [*self.ids, *(self.nodes[i] for i in self.path_to(node))]

    def leaves(self) -> list[int]:
        return sorted(set(range(len(self.parents))) - set(self.parents))

    def keep(self, node: int) -> None:
        """Compact the path to it; the tree has been fed whole."""
        kept = self.chain_to(node)
        self._runner.compact(self.row(0, len(self.nodes)), self.path_to(node))
        assert self.table.num_tokens == len(kept)
        self.ids, self.nodes, self.parents = kept, [], []

    def rebase(self, node: int) -> None:
        """Go on behind the path to a node with what was grown under it; the tree has been fed whole."""
        path, below = self.path_to(node), list[int]()
        for other in range(len(self.nodes)):
            if other not in path and node in self.path_to(other):
                below.append(other)
        keep = sorted([*path, *below])
        place = {old: new for new, old in enumerate(keep)}
        self._runner.rebase(self.table, len(self.ids), keep)
        assert [place[each] for each in path] == list(range(len(path))), "a path is fed before what is below it"
        self.ids = self.chain_to(node)
        self.nodes, parents = [self.nodes[each] for each in below], [self.parents[each] for each in below]
        self.parents = [-1 if each == node else place[each] - len(path) for each in parents]
        assert self.table.num_tokens == len(self.ids) + len(self.nodes)


def some_parents(count: int, seed: int) -> list[int]:
    """Of a tree whose nodes follow one of the four before them, or the token before the tree."""
    generator = random.Random(seed)
    return [generator.randrange(max(-1, node - 4), node) for node in range(count)]


def largest_tree_error(runner: ModelRunner, truth: Truth, *, relative: bool = False) -> float:
    """A tree of 22 nodes in two feeds after more tokens than windows hold, among other rows; one path goes on."""
    ids, vocab_size = some_ids(43, runner.facts.vocab_size, 20), runner.facts.vocab_size
    tree = Grown(runner, runner.pool.new_table(), ids, some_ids(22, vocab_size, 21), some_parents(22, 1), 20)
    a, b = (Fed(runner, truth, some_ids(60, vocab_size, seed), relative=relative, num_source=seed) for seed in (22, 23))
    step(runner, [(a, 30, 0), (b, 9, 0)])
    runner.forward([Row.of(tree.table, ids, 0, 0, tree.source)])
    errors, parts = list[float](), list[Tensor]()
    for first, end, feeds in ((0, 9, [(a, 36, 6), (b, 10, 1)]), (9, 22, [(a, 37, 1), (b, 30, 1)])):
        rows = [tree.row(first, end), *(one.row(to, num_logits) for one, to, num_logits in feeds)]
        found = runner.forward(rows).split([row.num_logits for row in rows])
        parts.append(found[0])
        errors += [one.error(row, part) for (one, _, _), row, part in zip(feeds, rows[1:], found[1:], strict=True)]
    logits = torch.cat(parts)  # [22, V]
    leaves = sorted(tree.leaves(), key=lambda leaf: len(tree.path_to(leaf)))[-3:]
    for leaf in leaves:
        expected = truth(tree.chain_to(leaf), *ids_of(tree.source))[43:]
        scale = expected.abs().max() if relative else 1.0
        errors.append(float((logits[tree.path_to(leaf)] - expected).abs().max() / scale))
    tree.keep(leaves[-1])
    again = Fed(runner, truth, [*tree.ids, *some_ids(4, vocab_size, 24)], relative=relative)
    again.table, again.num_cached, again.source = tree.table, len(tree.ids), tree.source
    errors.append(step(runner, [(again, len(again.ids), 4)]))
    for sequence in (again, a, b):
        sequence.free()
    return float("nan") if any(error != error for error in errors) else max(errors)
