"""What the target knows of a slot that steps by itself, and a slot as it goes into a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, repeat, takewhile
from operator import mul
from typing import Protocol

from outrider.engine.sampling.row_law import RowLaw
from outrider.engine.sampling.tree_acceptance import DraftTree, Drawn
from outrider.engine.speculation.nodes import NodeKind
from outrider.engine.speculation.ranks import SlotShares
from outrider.engine.worker.slots import Slot
from outrider.wire.kinds import Drafter
from outrider.wire.speculation import Speculation
from outrider.wire.transport.codec import Rows
from target_service.beams import Beams
from target_service.jobs import Fallback, VerifyJob
from target_service.parked import Parked

MOST_LACKED = 8
"""Lengths that are remembered for when their guesses come. Doubling it learns from later ones."""
ETA_WEIGHT = 0.25
"""Weight of a new arrival in what a slot's guesses usually take. Doubling it follows twice as fast, and chance, too."""


@dataclass(eq=False, slots=True)
class Delivered:
    """What one draft delivers for a slot, under a ticket of its own, and how long it takes."""

    ticket: int
    shares: SlotShares
    live: bool
    """Guesses came since they were last waited for in vain."""
    parked: Parked = field(default_factory=Parked)
    heard: bool = False
    """Something was delivered under the ticket."""
    lacked: dict[int, float] = field(default_factory=dict)
    """By the length at which nothing lay ready and nothing has come since: when the slot could go on."""
    lacked_len: int = 0
    """Length for which guesses came last where none had lain ready."""
    eta_s: float | None = None
    """How long after such a moment the first guesses usually come."""
    gap_s: float | None = None
    """How long after some guesses the next usually come, while the slot waits for them."""
    arrived_s: float = 0.0
    """When the last ones came."""
    is_ready: bool = False
    """Something lay ready when the slot could go on."""
    refused: str | None = None
    """What was wrong with a delivery since the last verdict."""
    num_wasted: int = 0
    """Draft tokens that came too late since the last verdict."""
    absent_len: int = 0
    """The length for whose step it was not waited for when the slot could go on: what comes is for the next."""
    reads_features: bool = False
    """It subscribes to features of the slot's committed tokens."""

    @property
    def hit(self) -> bool | None:
        """Return whether something lay ready when the slot could go on; None where nothing has come yet."""
        return self.is_ready if self.heard else None

    def arrived(self, root_len: int, arrived_s: float) -> None:
        """Note that guesses came, of use or not: they tell how long they take. root_len: what they hang under."""
        self.live = self.heard = True
        lacked_s = self.lacked.pop(root_len, None)
        if lacked_s is not None:
            self.eta_s = _mean(self.eta_s, max(0.0, arrived_s - lacked_s))
            self.lacked_len = root_len
        elif root_len == self.lacked_len:
            self.gap_s = _mean(self.gap_s, max(0.0, arrived_s - self.arrived_s))
        self.arrived_s = arrived_s

    def goes_on(self, length: int, is_ready: bool, now: float) -> None:
        """Note that the slot can take its next step, with that many tokens. is_ready: whether something is here."""
        self.refused, self.is_ready, self.num_wasted = None, is_ready, 0
        if not is_ready:
            self.lacked[length] = now
            if len(self.lacked) > MOST_LACKED:
                del self.lacked[next(iter(self.lacked))]


@dataclass(eq=False, slots=True)
class Lease:
    """A slot that steps by itself until it has `until_len` committed tokens."""

    job: VerifyJob
    slot: Slot
    speculation: Speculation
    until_len: int
    drafts: Sequence[Delivered]
    """Of each draft that may deliver, in the order in which draws are tested; at least one."""
    own_shares: dict[Drafter, SlotShares]
    """Of what each of the slot's own drafters guesses."""
    ready_s: float
    """When it could go on: its Verify or Extend came, or its last verdict left."""
    beams: Beams | None = None
    """What is searched in place of an answer that is drawn. The first draft alone delivers for it."""
    held_from_s: float | None = None
    """When the next step was first held back for guesses."""
    is_passed_over: bool = False
    """Draft tokens were expected for the next step, which began without them because to wait does not pay."""

    @property
    def first(self) -> Delivered:
        return self.drafts[0]

    @property
    def length(self) -> int:
        """Return the tokens that are committed, or those of each live beam."""
        return len(self.slot.committed) if self.beams is None else self.beams.length

    @property
    def room(self) -> int:
        """Return how many draft tokens a step may use one after the other: it commits one more than it accepts."""
        if self.beams is not None:
            return self.beams.depth
        return max(0, min(self.speculation.max_draft_tokens, self.slot.max_len - len(self.slot.committed) - 1))

    @property
    def runs(self) -> bool:
        """Whether it may take another step."""
        return self.length < self.until_len

    @property
    def num_undrafted(self) -> int:
        """Return the tokens that its next step feeds without drafts."""
        if self.beams is not None:
            return self.beams.num_fed(self.slot)
        return len(self.slot.committed) - len(self.slot.cached)

    def of_ticket(self, ticket: int) -> Delivered:
        """Return what is delivered under one of the lease's tickets."""
        return next(each for each in self.drafts if each.ticket == ticket)

    def shares_of(self, whose: Delivered | Drafter) -> SlotShares:
        return whose.shares if isinstance(whose, Delivered) else self.own_shares[whose]

    def goes_on(self, now: float) -> None:
        """Note that the slot can take its next step."""
        self.ready_s = now
        self.held_from_s = None
        self.is_passed_over = False
        for each in self.drafts:
            is_ready = bool(each.parked.chain(1) if self.beams is None else self.beams.num_here)
            each.goes_on(self.length, is_ready, now)


def _mean(before: float | None, new: float) -> float:
    return new if before is None else before + ETA_WEIGHT * (new - before)


@dataclass(frozen=True, slots=True)
class Scaffold:
    """Tokens that a drafter of the target's own has fed beside a step's drafts, to read what is said behind them. They
    are never drafts and never stay in the cache: what they bring are drafts of later steps.
    """

    drafter: Drafter
    ids: Sequence[int]
    parents: Sequence[int]
    """Of each the index of the token that it follows, the step's drafts counted before the scaffold; -1: the last
    committed token."""
    num_drafts: int
    """Of the step."""
    width: int
    """Most drafts of a later step that follow the same token."""
    depth: int
    """Most that follow each other."""

    def beside(self, num_drafts: int) -> Scaffold:
        """Return what hangs under the first `num_drafts` of the drafts and under the last committed token, which comes
        before what hangs under the others.
        """
        if num_drafts == self.num_drafts:
            return self
        others = range(num_drafts, self.num_drafts)
        kept = list(takewhile(lambda parent: parent not in others, self.parents))
        parents = [parent if parent < num_drafts else parent - len(others) for parent in kept]
        return replace(self, ids=self.ids[: len(kept)], parents=parents, num_drafts=num_drafts)

    def gain(self, shares: SlotShares) -> float:
        """Return how many tokens a step it is expected to bring, by how often what came of others was kept."""
        share = min(1.0, sum(map(shares.share, range(self.width))))
        return sum(accumulate(repeat(share, self.depth), mul))


@dataclass(frozen=True, slots=True)
class Source:
    """One of those that draft into one tree."""

    whose: Delivered | Drafter
    """What a draft delivered, or the target's own drafter."""
    ranks: Mapping[int, int]
    """Of the nodes that it says, perhaps as others do, the place among their siblings there."""
    drafts: Mapping[int, Draft] = field(default_factory=dict)
    """The same nodes as it says them."""


@dataclass(frozen=True)
class Ready:
    """A slot that goes into the next forward."""

    slot: Slot
    draft_ids: list[int]
    draft_laws: list[RowLaw] | None
    """Of a chain, what each of draft_ids was drawn from; None where that does not matter, for a tree and for plain."""
    tree: DraftTree | None = None
    """None for a chain."""
    guessed: bool = False
    """Under `rejection`: drafts are kept where the target draws the same with its numbers of the position, as under
    `coupled`. That is as often as by the other rules where there was no choice, and exact even where they were copied
    from what the same numbers once said."""
    drafter: Drafter | None = None
    """None for plain, and for what the grammar leaves no choice of."""
    fallback: Fallback | None = None
    scaffold: Scaffold | None = None
    drawn: Mapping[int, Sequence[Drawn]] = field(default_factory=dict)
    """Of a tree, what was drawn after each of its nodes, in the order in which it is tested; nothing where that does
    not matter."""
    sources: Sequence[Source] = ()
    """Of drafts of several sources, whose they are, in the order in which they are tested."""

    @property
    def parents(self) -> Sequence[int]:
        """Return of each draft the index of the one that it follows; -1 for the last committed token."""
        return range(-1, len(self.draft_ids) - 1) if self.tree is None else self.tree.parents

    def num_of(self, nodes: Sequence[int]) -> list[int]:
        """Return how many of these drafts each source has said first."""
        first = [next((i for i, each in enumerate(self.sources) if node in each.ranks), None) for node in nodes]
        return [first.count(i) for i in range(len(self.sources))]

    @property
    def scaffold_ids(self) -> Sequence[int]:
        return () if self.scaffold is None else self.scaffold.ids

    @property
    def is_walked(self) -> bool:
        """Whether drafts are kept as far as they are what the target says."""
        return self.guessed or self.slot.params.determined


class Draft(Protocol):
    """A draft token that a step may verify: of a tree that has come, or of the target's own."""

    @property
    def token_id(self) -> int: ...

    @property
    def rank(self) -> int:
        """Return its place among its siblings, the most likely or first drawn one 0."""

    @property
    def kind(self) -> NodeKind: ...

    @property
    def law(self) -> RowLaw | tuple[Rows, int] | None:
        """What it was drawn from, perhaps as it came: a row of a delivery. None but for LAW."""


Candidate = tuple[float, Draft, int]
"""A draft with its chance to be kept, and the index of its parent among its like."""


@dataclass(frozen=True, slots=True)
class Part:
    """What one of several sources says for a step."""

    whose: Delivered | Drafter
    nodes: Sequence[Candidate]
    most: int = 0
    """How long a chain may be, whatever is here of it; 0 of a tree of a named shape."""


@dataclass(frozen=True, slots=True)
class Candidates:
    """What a slot's step might verify, best first."""

    lease: Lease
    nodes: Sequence[Candidate] = ()
    must: int = 0
    """So many of them are verified whatever they cost."""
    drafter: Drafter | None = Drafter.MODEL
    """Who made them; MODEL where they were delivered, None where the grammar leaves no choice."""
    scaffold: Scaffold | None = None
    """What might be fed beside all of them."""
    parts: Sequence[Part] = ()
    """What each source says. `nodes` are those of one, and of several all, laid over each other, where guesses are
    walked."""
    order: Sequence[tuple[float, int]] = ()
    """Where they were drawn, the candidates are these draws, if any: of each its chance, and whose of `parts` it is,
    which may be shorter."""
    num_here: Sequence[int] | None = None
    """How many nodes of each draft might be verified; None where nothing that is delivered would be."""

    @property
    def gains(self) -> list[float]:
        return [chance for chance, *_ in (self.order or self.nodes)]

    @property
    def is_whole(self) -> bool:
        """Return whether it is verified as a whole or not at all: what was drawn may have decided how much is here."""
        params = self.lease.slot.params
        return self.lease.speculation.tree is not None and not params.determined and params.lenience == 1.0

    @property
    def most_must(self) -> int:
        """Return `must`, and of a tree that is verified as a whole how many might have been drawn: whether there is
        room for it must not follow from what was.
        """
        shape = self.lease.speculation.tree
        if shape is None or not self.must or not self.is_whole:
            return self.must
        return min(shape.most_nodes * max(1, len(self.parts)), self.lease.speculation.max_draft_tokens)

    def counts(self, count: int) -> list[int]:
        """Return how many nodes of each part are here, of the first so many that were drawn."""
        whose = [index for _, index in self.order[:count]]
        return [min(whose.count(index), len(part.nodes)) for index, part in enumerate(self.parts)]

    def num_nodes(self, count: int) -> int:
        """Return how many of the first so many are here."""
        return sum(self.counts(count)) if self.order else count

    @property
    def num_scaffolds(self) -> int:
        return 0 if self.scaffold is None else len(self.scaffold.ids)
