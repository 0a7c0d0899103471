"""Whole proposals at once, where the path offers a loop of all their steps (a GPU). Called by the proposer.

A proposal that a loop cannot make, or has no memory for, goes token by token as any other.
"""

from __future__ import annotations

from collections.abc import Sequence

from draft_service.active import Active, CopiedLaw, Drawn
from outrider.engine.cuda.draft_loop import Drafted, DraftLoop, Draw
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
    """Those of `wanted` that were made; the others are as they were."""
    groups: dict[tuple[int, int | None], list[Active]] = {}
    for a in wanted:
        groups.setdefault((a.job.num_draft_tokens, a.topk), []).append(a)
    looped: list[Looped] = []
    for (num_draft_tokens, topk), group in groups.items():
        rows = [a.row() for a in group]
        draws = [Draw(a.slot.params.temperature, a.uniforms) for a in group]
        try:
            drafted = loop.run(rows, num_draft_tokens, draws, topk)
        except OutOfBlocks:  # a loop may be longer than the proposals are
            continue
        if drafted is None:
            continue
        for a, row, token_ids in zip(group, rows, drafted.token_ids, strict=True):
            a.fed(row)
            a.slot.fed((token_ids or [0] * num_draft_tokens)[:-1])
        looped.extend(_looped(group, drafted))
    return looped


def _looped(group: Sequence[Active], drafted: Drafted) -> list[Looped]:
    made: list[Looped] = []
    for i, (a, token_ids) in enumerate(zip(group, drafted.token_ids, strict=True)):
        if token_ids is None:
            made.append((a, None))
        elif a.determined or drafted.log_probs is None:
            made.append((a, [Drawn(token_id, None) for token_id in token_ids]))
        else:
            copy = drafted.log_probs
            made.append((a, [Drawn(token_id, CopiedLaw(copy, (i, j))) for j, token_id in enumerate(token_ids)]))
    return made
