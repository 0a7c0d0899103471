"""What a simulated round needs to know of the pair: how many drafts are kept, and which guess then comes.

The demo pair runs once along texts that its target writes; widening changes neither. Greedy and coupled texts depend
on no draft, so ranks along them say everything. Under `rejection` a chain is drawn at every position of a text and
decided by block for every length: what is kept of it, and which guess the target's own token is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.common import DEMO_DRAFT, DEMO_TARGET
from benchmarks.overlap.colocated import Cached, Pair, draft_chain, load, ranked
from benchmarks.overlap.groups import Group
from outrider.engine.model_runner import ModelRunner
from outrider.engine.sampling.coupled import coupled_ranked
from outrider.engine.sampling.host_sampling import HostLogits
from outrider.engine.sampling.penalties import LogitRow, SamplingState
from outrider.engine.sampling.row_law import RowLaw, truncate_topk
from outrider.engine.speculation.drawing import NUM_LIKELY
from outrider.wire.requests.params import SamplingParams
from target_service.step.decide import decide
from target_service.step.step_rows import Decided
from tests.proposals import chain_proposal

MAX_CHAIN = 11
"""Drafts that a simulated round verifies at most."""
NUM_GUESSES = 16
"""Guesses that are told apart; the next number stands for none of them."""

Ints = NDArray[np.int16]


@dataclass(frozen=True)
class Traces:
    """Along [B] texts of [N] positions. A *guess* is the place among what the draft would try at a node: under
    `rejection` 0 is the token drawn there, and what the target would most likely draw itself follows; else all go by
    rank.
    """

    kept: Ints
    """[B, N, MAX_CHAIN + 1]: drafts kept of a chain of each length that begins at a position."""
    guess: Ints
    """[B, N, MAX_CHAIN + 1]: which guess the token after those is."""
    shares: NDArray[np.float64]
    """[NUM_GUESSES]: how often each guess comes after a chain kept so far."""

    @property
    def num_positions(self) -> int:
        """Positions at which a round may begin."""
        return int(self.kept.shape[1])

    def hit_rates(self, length: int, fans: Sequence[int]) -> dict[str, list[float]]:
        """Return, by kind of the last token of a round, how often it is among the first guesses of each number. The
        draft that it stands in place of is none of them.
        """
        kept, guess = self.kept[:, :, length].ravel(), self.guess[:, :, length].ravel()
        found = {}
        for kind, of_kind in (("recovered", guess[kept < length] - 1), ("bonus", guess[kept == length])):
            found[kind] = [float((of_kind < fan).mean()) if of_kind.size else 0.0 for fan in fans]
        return found


Task = tuple[Sequence[int], int]
"""Prompt and seed."""


def traces(group: Group, tasks: Sequence[Task], num_tokens: int, folder: Path) -> Traces:
    """Return the traces of a group's law, recorded into the folder of the groups' files when they are not there yet."""
    path = folder / f"traces-{group.law}.npz"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        _save(path, record(group, tasks, num_tokens))
    with np.load(path) as stored:
        return Traces(**{each.name: stored[each.name] for each in fields(Traces)})


def _save(path: Path, made: Traces) -> None:
    np.savez_compressed(path, **{each.name: getattr(made, each.name) for each in fields(Traces)})


def record(group: Group, tasks: Sequence[Task], num_tokens: int) -> Traces:
    """Run the demo pair over the prompts."""
    target, draft = load(str(DEMO_TARGET)), load(str(DEMO_DRAFT))
    pair, kept, guesses = Pair(target, draft), list[Ints](), list[Ints]()
    for prompt, seed in tasks:
        params = group.params(seed, num_tokens + MAX_CHAIN + 1)
        text = [*prompt, *pair.answer(prompt, params, 0).ids]
        along = _along_ranks if group.determined else _along_chains
        for found, made in zip(
            (kept, guesses), along(target, draft, text, len(prompt), params, num_tokens), strict=True
        ):
            found.append(made)
    return Traces(np.stack(kept), np.stack(guesses), _shares(np.stack(kept), np.stack(guesses), group.determined))


def _shares(kept: Ints, guess: Ints, determined: bool) -> NDArray[np.float64]:
    """Return how often each guess comes: of ranks where no chain precedes, else of what follows the first draft."""
    length = 0 if determined else 1
    first = (kept[:, :, length] == 1).mean() if length else 0.0
    after = guess[:, :, length][kept[:, :, length] == 0]
    counts = np.bincount(after, minlength=NUM_GUESSES + 1)[:NUM_GUESSES] / after.size
    return np.concatenate([[first], counts[1:] * (1.0 - first)]) if length else counts


def _along_ranks(
    target: ModelRunner, draft: ModelRunner, text: list[int], num_prompt: int, params: SamplingParams, num: int
) -> tuple[Ints, Ints]:
    """Return kept and guess [N, MAX_CHAIN + 1] of a text that no draft changes."""
    model, state = Cached(draft), SamplingState(params, text[:num_prompt], ())
    host = HostLogits(model.feed(text[:-1], len(text) - 1))
    model.free()
    ranks = list[int]()
    for place in range(num_prompt, len(text)):
        guesses = ranked(host, place - 1, LogitRow(state), place, NUM_GUESSES)
        ranks.append(guesses.index(text[place]) if text[place] in guesses else NUM_GUESSES)
    kept = np.zeros((num, MAX_CHAIN + 1), dtype=np.int16)
    guess = np.zeros_like(kept)
    for position in range(num):
        for length in range(MAX_CHAIN + 1):
            same = next((j for j in range(length) if ranks[position + j]), length)
            kept[position, length], guess[position, length] = same, ranks[position + same]
    return kept, guess


def _along_chains(
    target: ModelRunner, draft: ModelRunner, text: list[int], num_prompt: int, params: SamplingParams, num: int
) -> tuple[Ints, Ints]:
    """Return kept and guess [N, MAX_CHAIN + 1] of chains drawn along a text and decided by block."""
    models = Cached(target), Cached(draft)
    kept = np.zeros((num, MAX_CHAIN + 1), dtype=np.int16)
    guess = np.zeros_like(kept)
    state = SamplingState(params, text[:num_prompt], ())
    for position in range(num):
        committed = text[: num_prompt + position]
        drafts = draft_chain(models[1], committed, state, MAX_CHAIN + 1)
        logits = models[0].feed([*committed[len(models[0].ids) :], *drafts.ids], MAX_CHAIN + 2)
        for model in models:
            model.crop(len(committed) - 1)
        assert drafts.laws is not None
        slot: Any = SimpleNamespace(params=params, committed=committed)
        for length in range(MAX_CHAIN + 1):
            proposal = chain_proposal(slot, drafts.ids[:length], drafts.laws[:length])
            (decided,) = decide([proposal], [state], logits[: length + 1])
            assert isinstance(decided, Decided), decided
            place = len(decided.path)
            guesses = _guesses(drafts.laws[place], drafts.ids[place], params, len(committed) + place)
            kept[position, length] = place
            guess[position, length] = guesses.index(decided.next_id) if decided.next_id in guesses else NUM_GUESSES
    for model in models:
        model.free()
    return kept, guess


def _guesses(law: RowLaw, drawn: int, params: SamplingParams, position: int) -> list[int]:
    """Return what a draft tries at a position: what it drew there, and then what the target's numbers would pick."""
    left = truncate_topk(law.without(drawn), NUM_LIKELY)
    return [drawn, *coupled_ranked(left, params, position, NUM_GUESSES - 1)[0]]
