"""A table's guesses of what a draft that is a model draws next, fed behind the nodes that it is asked for. Where one is
what is then drawn, what follows it is known without another forward (CS Drafting: Chen et al., "Cascade Speculative
Drafting for Even Faster LLM Inference", arXiv 2312.11462).

What is drawn follows from the model's logits and the numbers of a place alone, so that proposals are those of a draft
without a table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from outrider.drafting.drafter import Follower
from outrider.engine.speculation.drafter import Said
from outrider.engine.speculation.ranks import SlotShares
from outrider.engine.speculation.tree import GrowingTree, Node


class Cascade:
    """The guesses about one slot, of one step at a time."""

    def __init__(self, follower: Follower, num_source: int, shares: SlotShares) -> None:
        """follower: of what an encoder reads, num_source tokens, and the committed tokens behind it. shares: how often
        guesses are right.
        """
        self.follower = follower
        self._num_source = num_source
        self._shares = shares
        self._guesses: dict[Node, Node] = {}
        """By node, the guess behind it."""
        self._asked: set[Node] = set()
        self._fed: list[Said] = []
        """What follows the guesses that were fed, in the order in which they lie in the cache, last."""
        self._drawn: list[int] = []
        """Ascending indices of those that were drawn."""

    def commit_from(self, base_len: int, ids: Sequence[int]) -> None:
        self.follower.truncate(self._num_source + base_len)
        self.follower.append(ids)

    def begin(self) -> None:
        """Begin a step."""
        self._guesses, self._asked, self._fed, self._drawn = {}, set(), [], []

    def offers(self, tree: GrowingTree, chance: float, node: Node) -> Iterator[tuple[float, Node, bool]]:
        """Yield a node that the tree offers, and then what the table guesses behind it, as far as the tree would feed
        it, were it drawn: each with the chance that what follows it is of use, and whether it is a guess.
        """
        yield chance, node, False
        walk, right = self.follower.walk(), 1.0
        for token_id in node.path(tree.root):
            walk.step(token_id)
        while (counts := walk.next()) is not None:
            ids, nums = counts
            guess = tree.guess(node, int(ids[nums.argmax()]))
            if not tree.wants(guess):
                return
            self._guesses[node] = guess
            right *= self._shares.share(0)
            yield right * (1.0 if tree.awaits_named else guess.chance), guess, True
            walk.step(guess.token_id)
            node = guess

    def ask(self, guess: Node) -> None:
        """Have a guess fed."""
        self._asked.add(guess)

    def behind(self, nodes: Sequence[Node]) -> list[Node]:
        """Return the guesses to be fed behind these nodes, in the order in which `follow` is asked for them."""
        found, level = list[Node](), list(nodes)
        while level:
            level = [self._guesses[node] for node in level if self._guesses.get(node) in self._asked]
            found += level
        return found

    def note_fed(self, said: Sequence[Said]) -> None:
        """Take what follows the first of the guesses `behind` the nodes, all that were fed."""
        self._fed = list(said)

    def follow(self, said: Said) -> Said | None:
        """Look at the children of a node, now that they are made. Return what follows the one that was guessed and fed:
        it lies in the cache as if the tree had been asked for it.
        """
        guess = self._guesses.pop(said.node, None)
        if guess is None:
            return None
        child = next((each for each in said.node.children if each.token_id == guess.token_id), None)
        self._shares.note(None if child is None else 0)
        index = next((index for index, each in enumerate(self._fed) if each.node is guess), None)
        if child is None or index is None or not isinstance(said.tree, GrowingTree) or not said.tree.wants(child):
            return None
        said.tree.feed(child)
        self._drawn.append(index)
        if guess in self._guesses:
            self._guesses[child] = self._guesses.pop(guess)
        return replace(self._fed[index], node=child)

    @property
    def num_fed(self) -> int:
        """Return how many guesses were fed in this step."""
        return len(self._fed)

    @property
    def drawn(self) -> Sequence[int]:
        """Return the indices of those that were drawn."""
        return self._drawn
