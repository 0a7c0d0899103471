"""Whole proposals at once, where the path offers a loop of all their steps (a GPU). Called by the proposer.

A proposal that a loop cannot make, or has no memory for, goes token by token as any other.
"""

from __future__ import annotations

from collections.abc import Sequence

from draft_service.active import Active, Drawn
from outrider.engine.cuda.draft_graph import DraftLoop, Draw
from outrider.engine.cuda.graphed_path import GraphedPath
from outrider.engine.kv_pool import OutOfBlocks
from outrider.engine.model_runner import ModelRunner
from outrider.wire.params import SamplingParams

Looped = tuple[Active, list[Drawn] | None]
"""A proposal that a loop has made, with its tokens; None when its logits were not finite."""


def loop_of(runner: ModelRunner) -> DraftLoop | None:
    return runner.path.draft_loop if isinstance(runner.path, GraphedPath) else None


def may_loop(a: Active) -> bool:
    """It has not begun, its laws are the model's own at a temperature, and nothing may end it early."""
    return a.growth is None and not a.draft_ids and not a.watched and is_plain(a.slot.params)


def is_plain(p: SamplingParams) -> bool:
    """Nothing but the temperature decides a law, and one uniform number its token."""
    unpenalised = p.repetition_penalty == 1.0 and p.presence_penalty == 0.0 and p.frequency_penalty == 0.0
    unbanned = not p.logit_bias and not p.bad_words and not p.min_tokens
    return (
        (p.greedy or not p.determined)
        and unpenalised
        and unbanned
        and p.top_k == 0
        and p.top_p == 1.0
        and p.min_p == 0.0
    )


def run_loops(loop: DraftLoop, wanted: Sequence[Active]) -> list[Looped]:
    """Make whole proposals; those of `wanted` that no loop serves are as they were."""
    looped: list[Looped] = []
    for topk in dict.fromkeys(a.topk for a in wanted):
        group = sorted((a for a in wanted if a.topk == topk), key=lambda a: a.job.num_draft_tokens)
        while group and not looped_together(loop, group, topk, looped):
            group.pop()  # the longest asks for the most
    return looped


def looped_together(loop: DraftLoop, group: Sequence[Active], topk: int | None, looped: list[Looped]) -> bool:
    """Whether one loop has made them all, however many tokens each asks for."""
    rows = [a.row() for a in group]
    draws = [Draw(a.job.num_draft_tokens, a.slot.params.temperature, a.uniforms) for a in group]
    try:
        drafted = loop.run(rows, draws, topk)
    except OutOfBlocks:  # a loop may be longer than the proposals are
        return False
    if drafted is None:
        return False
    for i, (a, row, token_ids) in enumerate(zip(group, rows, drafted.token_ids, strict=True)):
        a.fed(row)
        a.slot.fed((token_ids or [0] * a.job.num_draft_tokens)[:-1])
        laws = None if a.determined or drafted.laws is None else drafted.laws[i]
        drawn = [Drawn(token_id, laws and laws[j]) for j, token_id in enumerate(token_ids or ())]
        looped.append((a, drawn or None))
    return True
