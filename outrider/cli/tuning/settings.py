"""The settings that are compared, simplest first, and how a deployment is told of one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from outrider.client import AcceptanceRule, Drafter, DraftLogprobs, Speculation
from outrider.wire.params import AUTO, DraftTokens

PLAIN = "plain"
TOPK = 128
_OWN_K = 8
"""Of drafts that the target makes itself: they cost nothing, so that more of them may pay than of a model's."""
_DEEPEST = 8
"""Of trees: with four nodes for each level there are few enough for one step."""
_SMALL_DEPTH = 4
"""Of small trees: three nodes for each of so many levels were the fastest trees of `make bench-trees`."""
_ASKING_A_MODEL = (Drafter.MODEL, Drafter.NGRAM_MODEL, Drafter.LOOKUP_MODEL)


def chain_name(k: int) -> str:
    return f"K = {k}" if k else PLAIN


def chain(k: int, temperature: float) -> Speculation:
    """What is simplest: the draft's next k tokens, by rejection."""
    return _drafted(k, temperature, Drafter.MODEL) if k else Speculation(enabled=False)


def chains(ks: Iterable[int], temperature: float) -> dict[str, Speculation]:
    return {chain_name(k): chain(k, temperature) for k in ks}


def alternatives(k: int, max_k: int, temperature: float, offered: Iterable[Drafter]) -> dict[str, Speculation]:
    """By name, simplest first: plain decoding, drafters that need no draft worker, the draft's chain of as many tokens
    as the gateway thinks fit, and of k, other encodings and rules for it, other drafters beside it, and trees.

    offered: drafters that the deployment has.
    """
    offered = list(offered)
    found = chains((0,), temperature)
    for drafter in (each for each in offered if each not in _ASKING_A_MODEL):
        for own_k in sorted({k, min(_OWN_K, max_k)}):
            found[f"{chain_name(own_k)}, {drafter.value}"] = _drafted(own_k, temperature, drafter)
    found[f"K = {AUTO}"] = _drafted(AUTO, temperature, Drafter.MODEL)
    found |= chains((k,), temperature) | (_encoded_and_coupled(k) if temperature else {})
    for drafter in (each for each in offered if each in _ASKING_A_MODEL and each is not Drafter.MODEL):
        found[f"{chain_name(k)}, {drafter.value}"] = _drafted(k, temperature, drafter)
    return found | _trees(k, temperature)


def needs_draft(wish: Speculation) -> bool:
    """Whether a draft worker has any part in it."""
    return wish.enabled and wish.drafter in _ASKING_A_MODEL


def gateway_settings(wish: Speculation) -> dict[str, str]:
    """Of the gateway whose every answer is to be so."""
    if not wish.enabled:
        return {"num_draft_tokens": "0"}
    values = {
        "num_draft_tokens": wish.num_draft_tokens,
        "tree": wish.tree,
        "drafter": wish.drafter,
        "acceptance": wish.acceptance,
        "draft_logprobs": f"topk:{wish.draft_topk}" if wish.draft_topk else wish.draft_logprobs,
    }
    return {name: str(value) for name, value in values.items() if value is not None}


def _drafted(k: DraftTokens, temperature: float, drafter: Drafter) -> Speculation:
    """At temperature 0 there is no rule to choose, and no distribution travels."""
    if not temperature:
        return Speculation(num_draft_tokens=k, drafter=drafter)
    rule, encoding = AcceptanceRule.REJECTION, DraftLogprobs.AUTO
    return Speculation(num_draft_tokens=k, drafter=drafter, acceptance=rule, draft_logprobs=encoding)


def _trees(k: int, temperature: float) -> dict[str, Speculation]:
    """Small ones, no deeper than the chain, then those that are as deep: each with more guesses at the first tokens
    alone, and with the best nodes of any form.
    """
    small, depth = min(k, _SMALL_DEPTH), min(max(k, 2), _DEEPEST)
    small_best = [f"best:{3 * small}x{small}"] if small > 1 else []  # of one level it is the same tree
    shapes = [_widths("3", depth=small), *small_best, _widths("2", "2", depth=depth), f"best:{4 * depth}x{depth}"]
    found = {}
    for shape in shapes:
        tree = replace(chain(k, temperature), num_draft_tokens=None, tree=shape)
        found[f"tree {shape}"] = tree
        if temperature:
            found[f"tree {shape}, coupled"] = _coupled(tree)
    return found


def _widths(*first: str, depth: int) -> str:
    return "x".join([*first, *["1"] * (depth - len(first))])


def _coupled(wish: Speculation) -> Speculation:
    return replace(wish, draft_logprobs=None, acceptance=AcceptanceRule.COUPLED)


def _encoded_and_coupled(k: int) -> dict[str, Speculation]:
    simplest = chain(k, temperature=1.0)
    topk = replace(simplest, draft_logprobs=DraftLogprobs.TOPK, draft_topk=TOPK)
    return {
        f"{chain_name(k)}, full": replace(simplest, draft_logprobs=DraftLogprobs.FULL),
        f"{chain_name(k)}, topk:{TOPK}": topk,
        f"{chain_name(k)}, coupled": _coupled(simplest),
    }


def environment(settings: dict[str, str]) -> str:
    """As a shell takes it before a command."""
    return " ".join(f"OUTRIDER_GATEWAY_{name.upper()}={value}" for name, value in settings.items())
