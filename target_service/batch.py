"""From the logits of a step to what is accepted in each slot. Pure: no state but the slots' own parameters is read.

On a device, `device_batch.py` runs every rule once over all slots that use it. On the host a slot is decided at a time,
position by position, so that nothing is computed past its first rejection.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate

from torch import Tensor

from outrider.engine.acceptance import Noise, accept_block_one, accept_token_one
from outrider.engine.coupled import coupled_id
from outrider.engine.host_sampling import HostLogits
from outrider.engine.noise import Purpose
from outrider.engine.penalties import LogitRow, SamplingState
from outrider.engine.reported import Reported, reported
from outrider.engine.row_law import RowLaw
from outrider.engine.side_by_side import side_by_side
from outrider.engine.slot_noise import host_slot_uniforms
from target_service.device_batch import Decided, decide_on_device
from target_service.tree_decision import decide_tree
from target_service.waiting import Ready


def decide(
    ready: Sequence[Ready], states: Sequence[SamplingState], logits: Tensor, *, by_block: bool = True
) -> list[Decided]:
    """One per slot. logits: [sum(K_b + 1), V] float32, slots in order. by_block: how `rejection` looks at drafts.

    Raises NonFiniteLogits, naming a row of every slot that cannot be decided for it. Rows that nothing is decided by
    may hold anything on the host.
    """
    if not HostLogits.reads(logits):
        if all(r.tree is None for r in ready):
            return decide_on_device(ready, states, logits, by_block=by_block)
        logits = logits.cpu()  # where it goes on in a tree is seen row by row
    host, noise = HostLogits(logits), slots_noise(ready)
    starts = list(accumulate((len(r.draft_ids) + 1 for r in ready), initial=0))

    def decide_one(b: int) -> Decided:
        r, state, start, own = ready[b], states[b], starts[b], noise[b]
        if r.tree is not None:
            return decide_tree(r, r.tree, state, host, logits, start)
        if own is None:
            outcome = _matching(r, lambda j, guess: _says(r, state, host, start, j, guess))
        elif r.copied:
            laws = _laws(r, state, host, start)
            outcome = _matching(r, lambda j, _: laws(j).draw(float(own.target[j])))
        else:
            lenience = state.params.lenience
            rule = accept_block_one if by_block and lenience == 1.0 else partial(accept_token_one, lenience=lenience)
            outcome = rule(_laws(r, state, host, start), r.draft_laws or (), r.draft_ids, own)
        return Decided(*outcome, _reported(r, logits[start:], *outcome))

    return side_by_side(decide_one, range(len(ready)), logits.numel())


def _matching(ready: Ready, says: Callable[[int, int | None], int]) -> tuple[int, int]:
    """Keep drafts while they are what the target says. says(j, the draft there): its token after j drafts."""
    for j, token_id in enumerate(ready.draft_ids):
        own = says(j, token_id)
        if own != token_id:
            return j, own
    num_drafted = len(ready.draft_ids)
    return num_drafted, says(num_drafted, None)


def _says(ready: Ready, state: SamplingState, host: HostLogits, start: int, j: int, guess: int | None) -> int:
    """The target's token after j drafts: its best one (or a guess that is nearly as good, where that will do), or the
    one that the noise of its position picks.
    """
    row = _row(ready, state, j)
    if state.params.greedy:
        return host.best_id(start + j, row, guess)
    return coupled_id(host.law(start + j, row), state.params, len(ready.slot.committed) + j)


def _laws(ready: Ready, state: SamplingState, host: HostLogits, start: int) -> Callable[[int], RowLaw]:
    return lambda j: host.law(start + j, _row(ready, state, j))


def _reported(ready: Ready, raw: Tensor, num_accepted: int, next_id: int) -> tuple[Reported, ...]:
    """raw: logits that begin with the slot's own."""
    num_logprobs = ready.slot.params.num_logprobs
    if num_logprobs is None:
        return ()
    return tuple(reported(raw[: num_accepted + 1], [*ready.draft_ids[:num_accepted], next_id], num_logprobs))


def _row(ready: Ready, state: SamplingState, j: int) -> LogitRow:
    return LogitRow(state, tuple(ready.draft_ids[:j]))


def slots_noise(ready: Sequence[Ready]) -> list[Noise | None]:
    """Of every slot whose drafts are a chain and kept by chance; all numbers are made at once."""
    sampled = [r for r in ready if not r.slot.params.determined and r.tree is None]
    if not sampled:
        return [None] * len(ready)
    purposes = (Purpose.ACCEPT, Purpose.RECOVER, Purpose.TARGET)
    widths = [len(r.draft_ids) + 1 for r in sampled]
    params = [r.slot.params for r, width in zip(sampled, widths, strict=True) for _ in range(width)]
    positions = [len(r.slot.committed) + j for r, width in zip(sampled, widths, strict=True) for j in range(width)]
    rounds = [each for r, width in zip(sampled, widths, strict=True) for each in r.noise_rounds(width)]
    numbers = host_slot_uniforms(params, rounds, positions, purposes)  # [P, sum(K_b + 1)]
    ends = list(accumulate(widths))
    own = iter(Noise(*numbers[:, end - width : end]) for width, end in zip(widths, ends, strict=True))
    return [None if r.slot.params.determined or r.tree is not None else next(own) for r in ready]
