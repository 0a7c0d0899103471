"""Exact output laws of decoding by rounds, for the sound rule and for broken ones, by enumeration. Pure.

A rule is what happens at one drafted position: [V] float64 target and draft laws in, out the probability that each
token is drafted and kept, and that each token replaces a rejected draft. Their total is 1. Positions are independent
given what came before them, so this is all there is to a round.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from tests.law.expected import Answer, Conditionals, Law

Rule = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def sound(target: Tensor, draft: Tensor) -> tuple[Tensor, Tensor]:
    """Leviathan et al. 2023, Algorithm 1: the kept and the recovered mass add up to the target's."""
    return torch.minimum(target, draft), (target - draft).clamp_min(0.0)


def lenient(lenience: float) -> Rule:
    """Leviathan et al. 2023, A.5: a draft's probability counts as `lenience` of it."""

    def rule(target: Tensor, draft: Tensor) -> tuple[Tensor, Tensor]:
        kept, left = torch.minimum(draft, target / lenience), (target - lenience * draft).clamp_min(0.0)
        return kept, (1.0 - kept.sum()) * left / left.sum().clamp_min(1e-300)

    return rule


def residual_skipped(target: Tensor, draft: Tensor) -> tuple[Tensor, Tensor]:
    """A rejected draft is replaced by a draw from the target's own law."""
    kept = torch.minimum(target, draft)
    return kept, (1.0 - kept.sum()) * target


def truncated_after_draw(n: int) -> Rule:
    """The draft draws from its whole law and ships that law cut to the n best and the drawn token."""

    def rule(target: Tensor, draft: Tensor) -> tuple[Tensor, Tensor]:
        best = torch.zeros_like(draft, dtype=torch.bool).index_fill_(0, draft.topk(n).indices, True)
        kept, recovered = torch.zeros_like(target), torch.zeros_like(target)
        for x in range(len(draft)):
            shipped = torch.where(best | (torch.arange(len(draft)) == x), draft, 0.0)
            shipped /= shipped.sum()
            kept[x] = draft[x] * min(1.0, float(target[x] / shipped[x]))
            left = (target - shipped).clamp_min(0.0)
            recovered += (draft[x] - kept[x]) * left / left.sum().clamp_min(1e-300)
        return kept, recovered

    return rule


def noise_shared(target: Tensor, draft: Tensor) -> tuple[Tensor, Tensor]:
    """Drafting and keeping read one uniform: integrate over it between the steps of both."""
    drafted, left = draft.cumsum(0), (target - draft).clamp_min(0.0)
    left = left / left.sum() if left.sum() > 0 else target
    steps = torch.cat([torch.zeros(1).double(), drafted, target / draft.clamp_min(1e-300)])
    edges = steps.clamp(0.0, 1.0).sort().values
    widths, middles = edges.diff(), (edges[1:] + edges[:-1]) / 2
    kept, recovered = torch.zeros_like(target), torch.zeros_like(target)
    for width, u in zip(widths, middles, strict=True):
        x = min(int(torch.searchsorted(drafted, u)), len(draft) - 1)
        if u < target[x] / draft[x]:
            kept[x] += width
        else:
            recovered += width * left
    return kept, recovered


Believed = Callable[[Answer, Answer], Tensor]
"""(output when the round began, output and drafts before a position) -> what the target takes for its law there."""


def output_law(
    target: Conditionals,
    draft: Conditionals,
    rule: Rule,
    num_draft_tokens: int,
    max_tokens: int,
    believed: Believed | None = None,
) -> Law:
    """Joint law of whole answers when every round drafts num_draft_tokens, or as many as max_tokens leaves room for.

    `believed` stands in for `target` in the round, of a target that is wrong about its own law.
    """
    at: Believed = believed or (lambda start, prefix: target[prefix])
    starts: list[dict[Answer, float]] = [{(): 1.0}, *({} for _ in range(max_tokens))]
    whole: Law = dict.fromkeys((a for p in target for a in _next(p, target) if a not in target), 0.0)

    def commit(prefix: Answer, weights: Tensor) -> None:
        for answer, weight in zip(_next(prefix, target), weights.tolist(), strict=True):
            into = starts[len(answer)] if answer in target else whole
            into[answer] = into.get(answer, 0.0) + weight

    for length in range(max_tokens):
        for start, weight in starts[length].items():
            live = {start: weight}
            for _ in range(min(num_draft_tokens, max_tokens - length - 1)):
                drafted: dict[Answer, float] = {}
                for prefix, reached in live.items():
                    kept, recovered = rule(at(start, prefix), draft[prefix])
                    commit(prefix, reached * recovered)
                    drafted.update(zip(_next(prefix, target), (reached * kept).tolist(), strict=True))
                live = {}
                for answer, reached in drafted.items():
                    if answer in target:
                        live[answer] = reached
                    else:  # a kept draft that ends the answer
                        whole[answer] += reached
            for prefix, reached in live.items():
                commit(prefix, reached * at(start, prefix))
    return whole


def forgetful(unpenalised: Conditionals, frequency_penalty: float) -> Believed:
    """A target whose frequency penalty counts the committed tokens alone."""

    def at(start: Answer, prefix: Answer) -> Tensor:
        counts = torch.bincount(torch.tensor(start, dtype=torch.int64), minlength=len(unpenalised[prefix])).double()
        weights = unpenalised[prefix] * torch.exp(-frequency_penalty * counts)
        return weights / weights.sum()

    return at


def _next(prefix: Answer, laws: Conditionals) -> list[Answer]:
    return [(*prefix, i) for i in range(len(laws[prefix]))]
