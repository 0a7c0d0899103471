"""Both models in one process, with the product's engine, drawing and decisions, and no gateway in its loop.

`python -m benchmarks.overlap.colocated SETTINGS`, SETTINGS as JSON: `target` and `draft` (folders), `cores`. It stays
on those cores, with a thread for each, reads an order a line from stdin, and answers each with one line on stdout.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from benchmarks.overlap.groups import Group
from benchmarks.overlap.shapes import Shape
from benchmarks.steps import OurSteps
from outrider.engine.loading.loader import load_runner
from outrider.engine.model_runner import ModelRunner
from outrider.engine.sampling.coupled import coupled_id, coupled_ranked
from outrider.engine.sampling.host_sampling import HostLogits
from outrider.engine.sampling.noise import Purpose, host_slot_uniforms
from outrider.engine.sampling.penalties import LogitRow, SamplingState
from outrider.engine.sampling.row_law import RowLaw
from outrider.engine.speculation.draft_tree import DraftTree
from outrider.engine.step_plan import Row
from outrider.wire.requests.params import SamplingParams
from outrider.wire.settings.config import TargetConfig
from outrider.wire.transport.rpc import tune_malloc
from target_service.drafting.proposal import Proposal
from target_service.step.decide import decide
from target_service.step.step_rows import Decided
from tests.proposals import chain_proposal

WIDTHS = (*range(1, 17), 20, 24)
"""Tokens of a step whose cost is measured: more than any step of one answer has."""
NUM_GROWN = 6
"""Nodes of a step of a draft that grows a tree, about."""
KV_CACHE_TOKENS = 16384


@dataclass
class Answer:
    """One answer, and what it took from the end of its first step on."""

    ids: list[int]
    num_tokens: int = 0
    seconds: float = 0.0
    num_steps: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_draft_steps: int = 0
    draft_s: float = 0.0
    """Forwards of the draft and drawing."""
    forward_s: float = 0.0
    decide_s: float = 0.0


@dataclass(frozen=True)
class Drafts:
    """What a round has drafted."""

    ids: list[int]
    laws: list[RowLaw] | None = None
    tree: DraftTree | None = None
    num_steps: int = 0
    """Of the draft."""


class Cached:
    """One sequence in the cache of a model."""

    def __init__(self, runner: ModelRunner) -> None:
        self.ids: list[int] = []
        self._runner, self._table = runner, runner.pool.new_table()

    def feed(self, ids: Sequence[int], num_logits: int, parents: Sequence[int] | None = None) -> Tensor:
        """Return logits [num_logits, V] float32. parents: of the tree that the sequence ends with, as of `Row`."""
        row = Row(self._table, ids, len(self.ids), num_logits, list(self.ids), parents)
        logits = self._runner.forward([row])
        self.ids += ids
        return logits

    def keep(self, start: int, places: Sequence[int]) -> None:
        """Keep, of what comes after `start` tokens, those at these ascending places."""
        self._runner.rebase(self._table, start, places)
        self.ids[start:] = [self.ids[start + place] for place in places]

    def crop(self, num: int) -> None:
        self._table.truncate(num)
        del self.ids[num:]

    def free(self) -> None:
        self._table.free()


class Pair:
    """Answers one prompt at a time."""

    def __init__(self, target: ModelRunner, draft: ModelRunner) -> None:
        self._target, self._draft = target, draft

    def answer(self, prompt: Sequence[int], params: SamplingParams, shape: int | Shape) -> Answer:
        """shape: K of a chain, 0 for plain steps, or a tree."""
        target, draft = Cached(self._target), Cached(self._draft)
        committed, state = list(prompt), SamplingState(params, prompt, ())
        for model in (target, draft) if shape else (target,):
            model.feed(prompt[:-1], 0)
        found, began = Answer([]), 0.0
        while len(committed) < len(prompt) + params.max_tokens:
            started = time.perf_counter()
            drafts = self._propose(draft, committed, state, shape)
            drafted = time.perf_counter()
            decided, decide_s = self._step(target, committed, state, drafts)
            ended = time.perf_counter()
            self._follow(draft, committed, drafts, decided, shape)
            committed += [*(drafts.ids[node] for node in decided.path), decided.next_id]
            state.set_output(committed[len(prompt) :])
            if not found.ids:  # what comes after the first step counts
                began = time.perf_counter()
            else:
                found.num_steps += 1
                found.num_tokens += len(decided.path) + 1
                found.num_drafted += len(drafts.ids)
                found.num_accepted += len(decided.path)
                found.num_draft_steps += drafts.num_steps
                found.draft_s += drafted - started
                found.forward_s += ended - drafted - decide_s
                found.decide_s += decide_s
            found.ids = committed[len(prompt) :]
        found.seconds = time.perf_counter() - began
        found.ids = found.ids[: params.max_tokens]
        for model in (target, draft):
            model.free()
        return found

    def _propose(self, draft: Cached, committed: Sequence[int], state: SamplingState, shape: int | Shape) -> Drafts:
        if isinstance(shape, Shape):
            return draft_tree(draft, committed, state, shape)
        return draft_chain(draft, committed, state, shape)

    def _step(
        self, target: Cached, committed: list[int], state: SamplingState, drafts: Drafts
    ) -> tuple[Decided, float]:
        """Return the decision and the seconds that it took; keep what was accepted in the cache."""
        start, tail = len(target.ids), committed[len(target.ids) :]
        parents = None
        if drafts.tree is not None:
            parents = [*range(-1, len(tail) - 1), *(len(tail) + parent for parent in drafts.tree.parents)]
        logits = target.feed([*tail, *drafts.ids], len(drafts.ids) + 1, parents)
        began = time.perf_counter()
        slot: Any = SimpleNamespace(params=state.params, committed=committed)
        proposal = chain_proposal(slot, drafts.ids, drafts.laws)
        if drafts.tree is not None:
            proposal = Proposal(slot, drafts.tree)
        (decided,) = decide([proposal], [state], logits)
        assert isinstance(decided, Decided), decided
        decide_s = time.perf_counter() - began
        if drafts.tree is None:
            target.crop(len(committed) + len(decided.path))
        else:
            target.keep(start, [*range(len(tail)), *(len(tail) + node for node in decided.path)])
        return decided, decide_s

    def _follow(
        self, draft: Cached, committed: Sequence[int], drafts: Drafts, decided: Decided, shape: int | Shape
    ) -> None:
        """Keep in the draft's cache what was kept of what it was fed."""
        if isinstance(shape, Shape):
            fed = [node for level in shape.levels[1:] for node in level]
            draft.keep(len(committed), [place for place, node in enumerate(fed) if node in decided.path])
        elif shape:
            draft.crop(len(committed) + min(len(decided.path), len(drafts.ids) - 1))


def draft_chain(draft: Cached, committed: Sequence[int], state: SamplingState, num: int) -> Drafts:
    """Draw a chain as a draft worker does."""
    params, start = state.params, len(committed)
    ids, laws = list[int](), list[RowLaw]()
    numbers: Sequence[float] = ()
    if num and not params.determined:
        positions = range(start, start + num)
        numbers = host_slot_uniforms([params] * num, [start] * num, positions, [Purpose.DRAFT])[0].tolist()
    for place in range(num):
        host = HostLogits(draft.feed([*committed, *ids][len(draft.ids) :], 1))
        row = LogitRow(state, tuple(ids))
        if params.greedy:
            ids.append(host.best_id(0, row))
        elif params.determined:
            ids.append(coupled_id(host.law(0, row), params, start + place))
        else:
            laws.append(host.law(0, row).normalised())
            ids.append(laws[-1].draw(numbers[place]))
    return Drafts(ids, None if params.determined else laws, num_steps=num)


def draft_tree(draft: Cached, committed: Sequence[int], state: SamplingState, shape: Shape) -> Drafts:
    """Guess what comes in a shape of ranks, a level a step."""
    ids = [0] * len(shape.paths)
    shape_tree = DraftTree.of(range(len(ids)), shape.parents)
    fed = list[int]()
    for level in shape.levels:
        if level == (-1,):
            host = HostLogits(draft.feed(committed[len(draft.ids) :], 1))
        else:
            fed += level
            parents = [fed.index(parent) if parent >= 0 else -1 for parent in map(shape.parents.__getitem__, fed)]
            host = HostLogits(draft.feed([ids[node] for node in level], len(level), parents))
        for index, node in enumerate(level):
            prefix = () if node < 0 else tuple(ids[each] for each in shape_tree.path(node))
            guesses = ranked(host, index, LogitRow(state, prefix), len(committed), shape.num_children(node))
            for child, token_id in zip(shape_tree.children(node), guesses, strict=True):
                ids[child] = token_id
    return Drafts(ids, None, DraftTree.of(ids, shape.parents), len(shape.levels))


def ranked(host: HostLogits, index: int, row: LogitRow, committed_len: int, num: int) -> list[int]:
    """Return the `num` best guesses of what the target says after a node."""
    params = row.state.params
    if params.greedy:
        return host.ranked(index, row, num)[0]
    return coupled_ranked(host.law(index, row), params, committed_len + len(row.draft_prefix), num)[0]


def load(folder: str, context: int = KV_CACHE_TOKENS) -> ModelRunner:
    """Load a model as a worker does, in float32."""
    return load_runner(TargetConfig(model=folder, device="cpu", dtype="float32", kv_cache_tokens=context))


def step_costs(runners: Sequence[ModelRunner], prompt: list[int], num_rounds: int) -> list[dict[int, float]]:
    """Return the median seconds of a step of each by width; all take turns."""
    steps = [OurSteps(runner, prompt) for runner in runners]
    shapes = [[(width, one.for_shape(1, width)) for width in WIDTHS] for one in steps]
    taken: list[dict[int, list[float]]] = [{width: [] for width in WIDTHS} for _ in runners]
    for _ in range(num_rounds):
        for own, seconds in zip(shapes, taken, strict=True):
            for width, shape in own:
                shape.step(time.perf_counter)  # the step before had other weights in the caches
                seconds[width].append(shape.step(time.perf_counter))
    return [{width: statistics.median(each) for width, each in seconds.items()} for seconds in taken]


def draft_for(draft: ModelRunner, prompt: Sequence[int], seconds: float) -> None:
    """Run forwards of the draft for so long."""
    shape, end = OurSteps(draft, prompt).for_shape(1, NUM_GROWN), time.perf_counter() + seconds
    while time.perf_counter() < end:
        shape.step(time.perf_counter)


def serve(settings: dict[str, Any]) -> None:
    """Carry out orders until stdin ends."""
    os.sched_setaffinity(0, settings["cores"])
    torch.set_num_threads(len(settings["cores"]))
    tune_malloc()
    target, draft = load(settings["target"]), load(settings["draft"])
    pair = Pair(target, draft)
    tell(event="ready")
    for line in sys.stdin:
        order = json.loads(line)
        if order["do"] == "costs":
            verify, drafting = step_costs([target, draft], order["prompt"], order["rounds"])
            tell(event="done", verify=verify, draft=drafting)
            continue
        if order["do"] == "draft":
            draft_for(draft, order["prompt"], order["seconds"])
            tell(event="done")
            continue
        shape = order["shape"]
        made = pair.answer(
            order["prompt"],
            Group(*order["group"]).params(order["seed"], order["max_tokens"]),
            shape if isinstance(shape, int) else Shape(tuple(map(tuple, shape))),
        )
        tell(event="done", **asdict(made))


def tell(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]))
