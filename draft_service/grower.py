"""The draft's engine worker: grows a tree for every slot and pushes what it grows to the slot's target, without rounds.

A step asks the drafter what follows the likeliest nodes of all slots together, as many as make the most of its time,
draws or guesses their children, and sends them. Runs on the engine thread.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, islice

from draft_service.cascade import Cascade
from draft_service.growing import Growing
from draft_service.head_slot import HeadSlot
from draft_service.jobs import AdvanceJob, EngineJob, RowsJob, RowsRequest
from draft_service.pushing import NUM_URGENT, Pusher, Send
from outrider.drafting.drafter import SequenceDrafter
from outrider.engine.speculation.drafter import NodeDrafter, Said
from outrider.engine.speculation.drawing import grow, grow_beams
from outrider.engine.speculation.growing_beams import GrowingBeams
from outrider.engine.speculation.ranks import RankShares, SlotShares
from outrider.engine.speculation.row_budget import Alone, CallerPart, RowBudget, Unit, away
from outrider.engine.speculation.row_cost import RowCost, best_count
from outrider.engine.speculation.tree import MAX_FED, GrowingTree, Node, Plan
from outrider.engine.worker.engine_thread import EngineThread
from outrider.engine.worker.jobs import CloseJob, Fault, JobError, OpenJob, OwnerGone, SlotKey, TruncateJob
from outrider.engine.worker.scheduler import DORMANT_S
from outrider.engine.worker.slot_keeper import SlotKeeper
from outrider.engine.worker.slots import BareSlot
from outrider.wire.kinds import DraftLogprobs
from outrider.wire.metrics import WorkerMetrics

FULL_LOGPROBS_BUDGET_BYTES = 1 << 16
"""`auto` sends whole laws while those of a round of all slots stay under this. Doubling it doubles the wire's share.
Laws are sent for what is never verified, too: whole ones of 4,096 ids were 117 to 156 kB a committed token, cut ones 5
to 9."""
LAWS_OF_A_ROUND = 8
"""Laws that a slot's round is taken to send, keys' followers counted. Doubling it cuts laws at half the slots."""
MOST_LAW_BYTES = 64 << 20
"""Bytes of laws that one slot's tree keeps, in case they are to be sent again. Doubling it lets a tree of whole laws of
many ids grow twice as large."""
LAW_BYTES_AN_ID = 20
"""Of a law that is kept: a float32 score, an int64 id and a float64 weight. It follows from their types."""
MOST_OFFERS = 16
"""Nodes that one slot has in a step at most. Doubling it gives a draft with few slots wider steps."""

MakeDrafter = Callable[[Mapping[SlotKey, Growing]], NodeDrafter[Growing]]
"""Makes the drafter of a worker's slots, which it may look at."""


RequestRows = Callable[[str, int, RowsRequest], None]
"""Asks a target, by its address and epoch, for rows. Runs on the gRPC loop's thread."""


class Grower:
    """Runs the draft's jobs and steps."""

    def __init__(
        self,
        make_drafter: MakeDrafter,
        keeper: SlotKeeper[BareSlot],
        engine: EngineThread,
        send: Send,
        metrics: WorkerMetrics,
        vocab_size: int,
        request_rows: RequestRows | None = None,
        eos_token_ids: Sequence[int] = (),
        table: SequenceDrafter | None = None,
    ) -> None:
        """request_rows: for drafters that need rows of the target's. table: guesses what a model draws."""
        self._slots: dict[SlotKey, Growing] = {}
        self._drafter = make_drafter(self._slots)
        self._keeper = keeper
        self._engine = engine
        self._pusher = Pusher(engine, send, metrics)
        self._metrics = metrics
        self._vocab_size = vocab_size
        self._request_rows = request_rows
        self._eos_token_ids = set(eos_token_ids)
        self._table = table
        self._shares: dict[tuple[bool, bool, int], RankShares] = {}
        self._table_shares: dict[tuple[bool, bool], RankShares] = {}
        self._cost = RowCost()
        self._budget = RowBudget[_Offer](self._cost)

    # jobs

    def handle(self, job: object) -> None:
        match job:
            case AdvanceJob():
                self._advance(job)
            case OpenJob():
                self._open(job)
            case TruncateJob():
                self._truncate(job)
            case RowsJob():
                self._take_rows(job)
            case EngineJob():
                job.run()
            case CloseJob():
                self._forget((job.owner, job.slot_id))
                self._keeper.close(job)
            case OwnerGone():
                for key in [key for key in self._slots if key[0] == job.owner]:
                    self._forget(key)
                self._keeper.close_owner(job)
            case _:
                raise TypeError(f"unknown job {job!r}")

    def _open(self, job: OpenJob) -> None:
        is_translated = job.vocabulary is not None and job.vocabulary.translation is not None
        if job.params.beams is not None and (is_translated or not self._drafter.takes_beams):
            why = "this draft does not draft for beam searches; use one that is a model, with the target's tokenizer"
            refused = JobError(Fault.INVALID, why)
            self._engine.answer(partial(job.respond, refused))
            return
        slot = self._keeper.open(job)
        if slot is not None:
            width = 0 if job.params.beams is None else job.params.beams.width
            kind = (job.params.greedy, job.params.determined, width)
            shares = SlotShares(self._shares.setdefault(kind, RankShares()))
            cascade = None if is_translated or job.params.beams is not None else self._cascade(job, slot)
            self._slots[slot.key] = Growing(job, slot, shares, cascade=cascade)

    def _cascade(self, job: OpenJob, slot: BareSlot) -> Cascade | None:
        if self._table is None:
            return None
        num_source, kind = len(job.source_ids), (job.params.greedy, job.params.determined)
        follower = self._table.open([*job.source_ids, *slot.committed], num_source + slot.num_prompt, job.corpus_id)
        return Cascade(follower, num_source, SlotShares(self._table_shares.setdefault(kind, RankShares())))

    def _forget(self, key: SlotKey) -> None:
        """Let a slot go whose answer has ended: a table may remember it."""
        growing = self._slots.pop(key, None)
        if growing is not None and growing.cascade is not None:
            growing.cascade.follower.close()

    def _truncate(self, job: TruncateJob) -> None:
        """Guesses under what is committed stay: the slot has been told of that by an Advance, or will be. A stop string
        ends the answer.
        """
        growing = self._slots.get((job.owner, job.slot_id))
        is_ahead = growing is not None and growing.tree is not None and job.reason != "stop"
        if growing is not None and growing.tree is not None and not is_ahead:
            growing.tree = growing.block = None
            growing.slot.truncate(len(growing.slot.committed) + 1)
        self._keeper.truncate(job, keeps=is_ahead)

    def _advance(self, job: AdvanceJob) -> None:
        growing = self._slots.get((job.owner, job.slot_id))
        if growing is None:
            return  # closed meanwhile, or refused: the gateway knows, or is about to
        slot, new_len = growing.slot, job.base_len + len(job.committed_ids)
        if slot.params.beams is not None:
            self._advance_beams(growing, job)
            return
        tree = growing.tree if job.ticket == growing.ticket else None
        if tree is not None and new_len <= len(slot.committed):
            return  # late, or repeated
        wrong = self._keeper.check_commit(slot, job.base_len, job.committed_ids)
        if wrong is not None:
            self._tell(growing, wrong)
            return
        known = slot.committed[job.base_len :]
        if tree is None or known != list(job.committed_ids[: len(known)]):
            tree = self._begin(growing, job)
        else:
            self._re_root(growing, tree, job)
        slot.asked_s = time.monotonic()
        growing.ticket, growing.tree = job.ticket, tree
        if job.is_missed:
            tree.resend()
        growing.num_urgent = 0 if tree.root.children else NUM_URGENT
        self._ask_rows(growing)
        self._pusher.push_due(growing, goes_on=bool(tree.offers(1)))

    def _advance_beams(self, growing: Growing, job: AdvanceJob) -> None:
        """Do as for tokens with the levels of a search. Its levels are the same under any ticket."""
        slot, tree = growing.slot, growing.tree
        known_len, new_len = slot.num_prompt if tree is None else tree.length, job.base_len + len(job.levels)
        if tree is not None and job.ticket == growing.ticket and new_len <= known_len and not job.wrong:
            return  # late, or repeated
        wrong = _wrong_levels(job, slot, tree, known_len)
        if wrong is not None:
            self._tell(growing, wrong)
            return
        if tree is None:
            tree = growing.tree = self._begin_beams(growing)
        num_fed, is_known = len(tree.fed), self._drafter.knows(growing)
        settled, keep = tree.go_on(job.levels[known_len - job.base_len :])
        slot.commit_from(len(slot.committed), settled)
        if is_known:
            self._drafter.keep_fed(growing, num_fed, keep)
        else:
            slot.settle()
            tree.restart()
        slot.asked_s = time.monotonic()
        if job.is_missed or job.ticket != growing.ticket:
            tree.resend()
        growing.ticket, growing.num_urgent = job.ticket, 0 if tree.has_guesses else NUM_URGENT
        self._pusher.push_due(growing, goes_on=bool(tree.offers(1)))

    def _begin_beams(self, growing: Growing) -> GrowingBeams:
        slot = growing.slot
        slot.truncate(len(slot.committed) + 1)  # what lies behind them are nodes of a tree that is no more
        slot.commit_from(slot.num_prompt, ())
        slot.settle()
        stop_ids = set(slot.params.stop_token_ids) | (set() if slot.params.ignore_eos else self._eos_token_ids)
        speculation = growing.job.speculation
        return GrowingBeams(slot.committed, slot.max_len, slot.params, speculation, growing.shares, stop_ids)

    def _ask_rows(self, growing: Growing) -> None:
        """Ask the target for rows that are not here, whether they are under way or lost."""
        job, slot = growing.job, growing.slot
        if self._request_rows is not None and isinstance(slot, HeadSlot) and slot.lacks_features:
            request = RowsRequest(growing.ticket, slot.next_position, slot.request_id)
            ask = partial(self._request_rows, job.deliver_to, job.target_epoch, request)
            self._engine.answer(ask)

    def _take_rows(self, job: RowsJob) -> None:
        """Take in rows of a slot; those for another ticket, of another life of its target or of positions that the slot
        never has are of no use.
        """
        job.taken()
        growing = next((each for each in self._slots.values() if each.ticket == job.ticket), None)
        if growing is None or growing.job.target_epoch != job.target_epoch or not isinstance(growing.slot, HeadSlot):
            return
        if job.start + len(job.rows) <= growing.slot.max_len:
            growing.slot.take_features(job.start, job.rows, job.request_id)

    def _begin(self, growing: Growing, job: AdvanceJob) -> GrowingTree:
        """Return a tree that knows no guesses. Those of another are not for the cache to be compared by: its cells are
        in the order in which nodes were fed, and may have the ids of what is committed now and not its keys and values.
        """
        slot = growing.slot
        growing.block = None
        slot.truncate(len(slot.committed) + 1)
        _commit(growing, job)
        slot.settle()
        topk = self._cut(growing)
        num_laws = MOST_LAW_BYTES // (LAW_BYTES_AN_ID * (topk or self._width(growing)))
        most_fed = MAX_FED if slot.params.determined else min(MAX_FED, num_laws)
        drafter = self._drafter
        plan = Plan(
            *(growing.job.speculation, slot.params, growing.shares, drafter.takes_trees, topk),
            most_fed=most_fed,
            most_depth=self._most_depth(slot),
        )
        return GrowingTree(slot.committed, slot.max_len, slot.params, plan)

    def _re_root(self, growing: Growing, tree: GrowingTree, job: AdvanceJob) -> None:
        """Go on under the tokens committed; keep what is of use."""
        slot, num_fed = growing.slot, len(tree.fed)
        is_known, known_len = self._drafter.knows(growing), len(slot.committed)
        _commit(growing, job)
        tree.plan.most_depth = self._most_depth(slot)
        keep = tree.advance(slot.committed[known_len:])
        if is_known:
            self._drafter.keep_fed(growing, num_fed, keep)
        else:
            slot.settle()
            tree.restart()

    def _cut(self, growing: Growing) -> int | None:
        """Return to how many ids a slot's laws are cut, None for whole ones; `auto` goes by the budget."""
        speculation = growing.job.speculation
        if growing.slot.params.determined or speculation.draft_logprobs is DraftLogprobs.FULL:
            return None
        if speculation.draft_logprobs is DraftLogprobs.TOPK:
            return speculation.draft_topk
        num_slots = sum(1 for each in self._slots.values() if not each.slot.params.determined)
        num_bytes = 4 * self._width(growing) * LAWS_OF_A_ROUND * num_slots
        return None if num_bytes <= FULL_LOGPROBS_BUDGET_BYTES else speculation.draft_topk

    def _width(self, growing: Growing) -> int:
        """Return how many ids a slot's whole laws have."""
        vocabulary = growing.job.vocabulary
        return self._vocab_size if vocabulary is None else vocabulary.size

    def _most_depth(self, slot: BareSlot) -> int | None:
        bounds = [bound for bound in (self._drafter.most_depth, slot.most_depth) if bound is not None]
        return min(bounds, default=None)

    def _tell(self, growing: Growing, error: JobError) -> None:
        self._engine.answer(partial(growing.job.respond, error))

    # steps

    def next_wake(self) -> float | None:
        return self._drafter.next_wake()

    def step(self, now: float) -> bool:
        """Ask for the likeliest nodes of all slots, make what follows them, and send it."""
        wanted = self._choose(now)
        said = self._drafter.say(wanted, now)
        if said is None:
            return False
        owners = {id(growing.tree): growing for growing, _ in wanted}
        num_rows, began_s = len(said), now
        while said:
            drawn, searched = [s for s in said if not _searches(s)], [s for s in said if _searches(s)]
            for tree, why in (*grow(drawn), *grow_beams(searched)):
                self._give_up(owners[id(tree)], why)
            self._metrics.steps.labels(kind="grow").inc(len(said))
            ended_s = time.monotonic()
            for grown in {id(each.tree) for each in said}:
                owners[grown].spent_s += ended_s - began_s
            began_s = ended_s
            self._push_drawn(owners.values())
            said = [more for each in said if (more := _follow(owners[id(each.tree)], each)) is not None]
        num_rows += sum(self._drop_guesses(growing) for growing in owners.values())
        seconds = time.monotonic() - now
        if num_rows:
            self._cost.note(num_rows, seconds)
            self._budget.note(seconds)
        self._metrics.busy_seconds.inc(seconds)
        self._keeper.refresh_gauges()
        for growing in owners.values():
            self._pusher.push_due(growing, goes_on=growing.tree is not None and bool(growing.tree.offers(1)))
        return True

    def _push_drawn(self, asked: Iterable[Growing]) -> None:
        """Let what was drawn leave before anybody looks at what it is: a token's time must not follow from its id."""
        for growing in asked:
            if not growing.slot.params.determined:
                self._pusher.push_due(growing, goes_on=True)

    def _drop_guesses(self, growing: Growing) -> int:
        """Take out of the cache what a table guessed and was not drawn. Return how many guesses were fed."""
        cascade = growing.cascade
        if cascade is None or growing.tree is None or not cascade.num_fed:
            return 0
        num_fed, num_drawn = cascade.num_fed, len(cascade.drawn)
        if num_drawn < num_fed:
            self._drafter.keep_fed(growing, num_fed, cascade.drawn)
        self._metrics.guessed_tokens.labels(fate="drawn").inc(num_drawn)
        self._metrics.guessed_tokens.labels(fate="dropped").inc(num_fed - num_drawn)
        return num_fed

    def fail_step(self, error: Exception) -> None:
        """Give up every slot that grows: what is in its cache cannot be trusted, and the gateway opens it again."""
        for growing in [growing for growing in self._slots.values() if growing.tree is not None]:
            self._give_up(growing, f"the draft's step failed: {error}")

    def _give_up(self, growing: Growing, why: str) -> None:
        self._tell(growing, JobError(Fault.INTERNAL, why))
        growing.slot.distrust()
        growing.tree = None
        del self._slots[growing.slot.key]
        self._keeper.close(CloseJob(*growing.slot.key))

    def _choose(self, now: float) -> list[tuple[Growing, Sequence[Node]]]:
        """Return what is asked for next: nodes of several slots, the likeliest first unless that slows a caller by more
        than its part. A table's guesses behind them are asked for where they are as likely.
        """
        offers: dict[bytes, list[Iterable[_Offer]]] = {}
        weights: dict[bytes, float] = {}
        most = MOST_OFFERS if self._drafter.takes_trees else 1
        for index, growing in enumerate(self._slots.values()):
            tree, scheduling = growing.tree, growing.slot.scheduling
            if tree is None:
                continue
            if now - growing.slot.asked_s < DORMANT_S:
                weights[scheduling.caller] = scheduling.weight
            if not self._drafter.is_ready(growing):
                continue
            if not self._drafter.knows(growing):
                tree.restart()
            if growing.cascade is not None:
                growing.cascade.begin()
            if own := [_offers(growing, index, chance, node) for chance, node in tree.offers(most)]:
                offers.setdefault(scheduling.caller, []).extend(own)
                weights[scheduling.caller] = scheduling.weight
        best = self._fair(offers, weights)
        chosen: dict[int, tuple[Growing, list[Node]]] = {}
        for _, index, node, growing, is_guess in best:
            if not is_guess:
                chosen.setdefault(index, (growing, []))[1].append(node)
            elif growing.cascade is not None:
                growing.cascade.ask(node)
        return list(chosen.values())

    def _best(self, offers: Iterable[Iterable[_Offer]]) -> list[_Offer]:
        """Return those that make the most of the draft's time, the likeliest first; one at least, if there are any."""
        best = list(islice(heapq.merge(*offers, key=_rank), self._cost.reach))
        return best[: max(1, best_count([-chance for chance, *_ in best], 0.0, 0, self._cost))]

    def _fair(self, offers: Mapping[bytes, Iterable[Iterable[_Offer]]], weights: Mapping[bytes, float]) -> list[_Offer]:
        """Return the same, of several callers, each with its part. weights: of all that are drafted for."""
        if len(weights) < 2:
            self._budget.deal(())
            return self._best(chain.from_iterable(offers.values()))
        listed = {caller: [list(each) for each in own] for caller, own in offers.items()}
        best, parts = self._best(chain.from_iterable(listed.values())), list[CallerPart[_Offer]]()
        gains, num_rows = dict.fromkeys(listed, 0.0), dict.fromkeys(listed, 0)
        for chance, *_, growing, _ in best:
            gains[growing.slot.scheduling.caller] -= chance
            num_rows[growing.slot.scheduling.caller] += 1
        for caller, weight in weights.items():
            own = listed.get(caller)
            if own is None:
                parts.append(away(caller, weight))
                continue
            most_gain = -sum(chance for each in own for chance, *_ in each)
            step = partial(self._alone, own)
            parts.append(CallerPart(caller, weight, gains[caller], num_rows[caller], most_gain, 1, step))
        return self._budget.deal(parts) or best

    def _alone(self, offers: Iterable[Iterable[_Offer]]) -> Alone[_Offer]:
        best = self._best(offers)
        return Alone(-sum(chance for chance, *_ in best), [Unit(offer, 1) for offer in best])


_Offer = tuple[float, int, Node, Growing, bool]
"""A node with its negated chance, the place of its slot, and whether it is a guess."""


def _rank(offer: _Offer) -> tuple[float, int]:
    return offer[:2]


def _offers(growing: Growing, index: int, chance: float, node: Node) -> Iterator[_Offer]:
    """Yield a node that the tree of a slot offers, and what a table guesses behind it."""
    tree = growing.tree
    if growing.cascade is None or not isinstance(tree, GrowingTree):
        yield -chance, index, node, growing, False
        return
    for each, ahead, is_guess in growing.cascade.offers(tree, chance, node):
        yield -each, index, ahead, growing, is_guess


def _follow(growing: Growing, said: Said) -> Said | None:
    """Return what follows that child of a node that has just been made which a table had guessed."""
    if growing.cascade is None or growing.tree is not said.tree:  # it may have been given up
        return None
    return growing.cascade.follow(said)


def _commit(growing: Growing, job: AdvanceJob) -> None:
    growing.slot.commit_from(job.base_len, job.committed_ids)
    if growing.cascade is not None:
        growing.cascade.commit_from(job.base_len, job.committed_ids)


def _searches(said: Said) -> bool:
    return isinstance(said.tree, GrowingBeams)


def _wrong_levels(job: AdvanceJob, slot: BareSlot, tree: GrowingBeams | None, known_len: int) -> JobError | None:
    """Return why a search cannot go on with the levels of a message; None when it can."""
    if job.base_len > known_len:
        return JobError(Fault.BEHIND, f"slot {slot.key[1]} knows {known_len} tokens", known_len)
    new, num_live = job.levels[known_len - job.base_len :], 1 if tree is None else len(tree.live)
    why = job.wrong
    if job.base_len < slot.num_prompt or known_len + len(new) >= slot.max_len:
        why = (
            f"base_len {job.base_len} and {len(job.levels)} levels, the slot holds {slot.num_prompt} to {slot.max_len}"
        )
    elif not all(level.live for level in new):
        why = "a level has no beams that go on"
    elif new and not all(parent < num_live for parent, _, _ in new[0].live):
        why = f"a level continues a beam that is not among {num_live}"
    return JobError(Fault.INVALID, why) if why else None
