"""One token for every proposal of a step, from the step's logits. Pure; called by the proposer.

A law that will be sent cut is cut and renormalised *before* the draw: what the target gets is what was drawn from.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from draft_service.active import Active, CopiedLaw, Drawn
from outrider.engine import sampling
from outrider.engine.coupled import coupled_id
from outrider.engine.cuda.host_copy import to_device, to_host
from outrider.engine.device_coupled import coupled_ids
from outrider.engine.host_sampling import HostLogits
from outrider.engine.penalties import LogitRow, NonFiniteLogits, process_unchecked, sound_rows
from outrider.engine.row_law import RowLaw, truncate_topk
from outrider.engine.side_by_side import side_by_side


def draw_tokens(ready: Sequence[Active], rows: Sequence[LogitRow], logits: Tensor) -> list[Drawn]:
    """logits [R, V] float32, one row per proposal. Raises NonFiniteLogits."""
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
    """What is drawn from, and what the target is told of it."""
    return (law if a.topk is None else truncate_topk(law, a.topk)).normalised()


def _on_device(ready: Sequence[Active], rows: Sequence[LogitRow], logits: Tensor) -> list[Drawn]:
    """The host waits once, for the tokens; the laws leave on a stream of their own and are waited for where they are
    sent.
    """
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
    chosen = [i for i, a in enumerate(ready) if not a.determined]
    laws = None
    if chosen:
        index = to_device(np.array(chosen), logits.device)
        laws = _cut(sampling.distributions(processed[index], [rows[i] for i in chosen]), [ready[i] for i in chosen])
        u = to_device(np.array([ready[i].uniforms[len(ready[i].draft_ids)] for i in chosen]), logits.device)
        drawn, has_mass = sampling.inverse_cdf(laws.double().exp(), u)
        ids, sound = ids.index_copy(0, index, drawn), sound.index_copy(0, index, sound[index] & has_mass)
    copy = None if laws is None else to_host(laws)  # beside what follows
    told = (ids, sound.long()) if chances is None else (ids.double(), sound.double(), chances)
    values = torch.stack(told).cpu().numpy()  # [2 or 3, R]: the one wait of a step
    if not values[1].all():
        raise NonFiniteLogits(np.flatnonzero(values[1] == 0).tolist())
    laws_of = {} if copy is None else {i: CopiedLaw(copy, (place,)) for place, i in enumerate(chosen)}
    chance_of = {i: float(values[2][i]) for i, a in enumerate(ready) if a.watched} if watched else {}
    return [Drawn(int(token_id), laws_of.get(i), chance_of.get(i)) for i, token_id in enumerate(values[0])]


def _cut(laws: Tensor, ready: Sequence[Active]) -> Tensor:
    """[S, V] float32 log-probs; each row cut as its proposal asks."""
    for topk in {a.topk for a in ready if a.topk is not None}:
        cut = to_device(np.array([a.topk == topk for a in ready]), laws.device)[:, None]
        laws = torch.where(cut, sampling.truncate_topk(laws, topk), laws)
    return laws
