"""Draw a token for every proposal of a step, or a level of a tree, from the step's logits. Called by the proposer.

A law that will be sent cut is cut and renormalised *before* the draw: what the target gets is what was drawn from.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from draft_service.active import Active, Drawn
from draft_service.tree_growth import Growth, Guesses
from outrider.engine.cuda.host_copy import to_device, to_host
from outrider.engine.sampling import sampling
from outrider.engine.sampling.coupled import coupled_id, coupled_ids, coupled_ranked
from outrider.engine.sampling.host_sampling import HostLogits
from outrider.engine.sampling.noise import Purpose, host_slot_uniforms
from outrider.engine.sampling.penalties import LogitRow, NonFiniteLogits, SamplingState, process_unchecked, sound_rows
from outrider.engine.sampling.row_law import RowLaw, truncate_topk
from outrider.engine.sampling.side_by_side import side_by_side


def draw_tokens(ready: Sequence[Active], rows: Sequence[LogitRow], logits: Tensor) -> list[Drawn]:
    """Draw a token for each proposal from logits [R, V] float32, a row each. Raises NonFiniteLogits."""
    if not HostLogits.reads(logits):
        return _on_device(ready, rows, logits)
    host = HostLogits(logits)

    def draw_one(index: int) -> Drawn:
        a, row = ready[index], rows[index]
        params = row.state.params
        if params.greedy:
            return Drawn(host.best_id(index, row), None, host.best_chance(index, row) if a.watched else None)
        law = host.law(index, row)
        if not a.determined:
            return _sampled(a, law)
        token_id = coupled_id(law, params, a.position)
        return Drawn(token_id, None, law.prob(token_id) if a.watched else None)

    return side_by_side(draw_one, range(len(ready)), logits.numel())


def _sampled(a: Active, law: RowLaw) -> Drawn:
    law = as_sent(a, law)
    token_id = law.draw(a.uniforms[len(a.draft_ids)])
    return Drawn(token_id, law)


def as_sent(a: Active, law: RowLaw) -> RowLaw:
    """Return the law that is drawn from, which the target gets."""
    return (law if a.topk is None else truncate_topk(law, a.topk)).normalised()


def _on_device(ready: Sequence[Active], rows: Sequence[LogitRow], logits: Tensor) -> list[Drawn]:
    """Draw in torch. The host waits once, for tokens and the laws they were drawn from: a cut one as its entries."""
    processed = process_unchecked(logits, rows)
    ids = sampling.argmax(processed)  # [R] int64
    watched = any(a.watched for a in ready)
    chances = processed.double().softmax(dim=1).amax(dim=1) if watched else None  # [R] float64
    sound = sound_rows(logits)  # [R] bool
    coupled = [i for i, a in enumerate(ready) if a.determined and not a.slot.params.greedy]
    if coupled:
        index = to_device(np.array(coupled), logits.device)
        own = sampling.distributions(processed[index], [rows[i] for i in coupled])
        keys = [ready[i].slot.params for i in coupled], [ready[i].position for i in coupled]
        picked = coupled_ids(own, *keys)
        ids = ids.index_copy(0, index, picked)
        if chances is not None:  # [S] of the ids that were picked
            picked_chances = sampling.probabilities(own).gather(1, picked[:, None])[:, 0]
            chances = chances.index_copy(0, index, picked_chances)
    sent: list[tuple[list[int], sampling.Laws]] = []
    for topk in dict.fromkeys(a.topk for a in ready if not a.determined):
        members = [i for i, a in enumerate(ready) if not a.determined and a.topk == topk]
        index = to_device(np.array(members), logits.device)
        laws = sampling.cut(sampling.distributions(processed[index], [rows[i] for i in members]), topk)
        u = to_device(np.array([ready[i].uniforms[len(ready[i].draft_ids)] for i in members]), logits.device)
        drawn, has_mass = laws.draw(u)
        ids, sound = ids.index_copy(0, index, drawn), sound.index_copy(0, index, sound[index] & has_mass)
        sent.append((members, laws))
    drawn_of = (ids, sound.long()) if chances is None else (ids.double(), sound.double(), chances)
    values, *parts = to_host(torch.stack(drawn_of), *(part for _, laws in sent for part in laws))  # [2 or 3, R], ...
    if not values[1].all():
        raise NonFiniteLogits((values[1] == 0).nonzero()[:, 0].tolist())
    law_of: dict[int, RowLaw] = {}
    for (members, _), scores, ids_of in zip(sent, parts[::2], parts[1::2], strict=True):
        law_of.update(zip(members, sampling.Laws(scores, ids_of).rows(logits.shape[1]), strict=True))
    chance_of = {i: float(values[2, i]) for i, a in enumerate(ready) if a.watched} if watched else {}
    return [Drawn(int(token_id), law_of.get(i), chance_of.get(i)) for i, token_id in enumerate(values[0].tolist())]


def grow_level(a: Active, state: SamplingState, host: HostLogits, start: int) -> None:
    """Draw or guess the children of the frontier's nodes. host: the step's logits, whose rows from `start` on are those
    after each of these nodes. Raises NonFiniteLogits.
    """
    growth, params = a.growth, a.slot.params
    assert growth is not None, "no tree grows here"
    position = len(a.slot.committed) + growth.num_levels
    rows = [LogitRow(state, growth.prefix(node)) for node in growth.frontier]
    num_ranked = growth.num_ranked()

    def guessed(index: int) -> Guesses:
        if params.greedy:
            return host.ranked(start + index, rows[index], num_ranked)
        return coupled_ranked(host.law(start + index, rows[index]), params, position, num_ranked)

    def law(index: int) -> RowLaw:
        return as_sent(a, host.law(start + index, rows[index]))

    num_logits = len(rows) * host.vocab_size
    if a.determined:
        growth.guess(side_by_side(guessed, range(len(rows)), num_logits))
    else:
        growth.draw(side_by_side(law, range(len(rows)), num_logits), _uniforms(a, growth, position))
    if growth.done:
        a.take_tree()


def _uniforms(a: Active, growth: Growth, position: int) -> list[float]:
    """Return a number for each draw of the level at `position`, by its place among them."""
    count, committed_len = growth.most_drawn(), len(a.slot.committed)
    each = [a.slot.params] * count, [committed_len] * count, [position] * count
    return host_slot_uniforms(*each, [Purpose.DRAFT], range(count))[0].tolist()
