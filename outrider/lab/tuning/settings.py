"""The settings that are compared, simplest first, and the gateway's settings and variables that stand for one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from outrider.client import AcceptanceRule, Drafter, DraftLogprobs, Speculation
from outrider.wire.requests.speculation import AUTO, NumDraftTokens
from outrider.wire.settings.config import GatewayConfig

PLAIN = "plain"
TOPK = 128
_OWN_K = 8
"""K of drafts that the target makes itself: they cost nothing, so that more of them may pay than of a model's."""
_DEEPEST = 8
"""Levels of the largest trees: with four nodes for each they just fit the gateway's own `max_draft_tokens`."""
_SMALL_DEPTH = 4
"""Levels of small trees: three nodes for each of so many were the fastest trees of `make bench-trees`."""
_MAX_DRAFT_TOKENS: int = GatewayConfig.model_fields["max_draft_tokens"].default


def chain_name(k: int) -> str:
    return f"K = {k}" if k else PLAIN


def chain(k: int, temperature: float) -> Speculation:
    """Return what is simplest: the draft's next k tokens, by rejection; plain decoding for 0."""
    return _drafted(k, temperature, Drafter.MODEL) if k else Speculation(enabled=False)


def chains(ks: Iterable[int], temperature: float) -> dict[str, Speculation]:
    return {chain_name(k): chain(k, temperature) for k in ks}


def alternatives(k: int, max_k: int, temperature: float, offered: Iterable[Drafter]) -> dict[str, Speculation]:
    """Return by name, simplest first: plain decoding, drafters that need no draft worker, the draft's chain of as many
    tokens as the gateway thinks fit, and of k, other encodings and rules for it, other drafters beside it, and trees.

    offered: drafters that the deployment has.
    """
    # Prompts alone cannot measure predictions, and `auto` is the arm of K = auto.
    offered = [drafter for drafter in offered if not drafter.needs_prediction and drafter is not Drafter.AUTO]
    found = chains((0,), temperature)
    for drafter in (each for each in offered if not each.needs_draft_worker):
        for own_k in sorted({k, min(_OWN_K, max_k)}):
            found[f"{chain_name(own_k)}, {drafter}"] = _drafted(own_k, temperature, drafter)
    found[f"K = {AUTO}"] = _drafted(AUTO, temperature, Drafter.AUTO)
    found |= chains((k,), temperature) | (_encoded_and_coupled(k) if temperature else {})
    for drafter in (each for each in offered if each.needs_draft_worker and each is not Drafter.MODEL):
        found[f"{chain_name(k)}, {drafter}"] = _drafted(k, temperature, drafter)
    return found | _trees(k, temperature)


def needs_draft(options: Speculation) -> bool:
    """Return whether a draft worker has any part in it."""
    return options.enabled and options.drafter is not None and Drafter(options.drafter).asks_draft_worker


def max_draft_tokens(k: int) -> int:
    """Return the gateway's setting that allows chains of k and every tree that is compared."""
    return max(k, _MAX_DRAFT_TOKENS)


def gateway_settings(options: Speculation) -> dict[str, str]:
    """Return the settings of a gateway that speculates so for every request."""
    if not options.enabled:
        return {"num_draft_tokens": "0"}
    k = options.num_draft_tokens
    values = {
        "num_draft_tokens": k,
        "max_draft_tokens": k if isinstance(k, int) and k > _MAX_DRAFT_TOKENS else None,
        "tree": options.tree,
        "drafter": options.drafter,
        "acceptance": options.acceptance,
        "draft_logprobs": f"topk:{options.draft_topk}" if options.draft_topk else options.draft_logprobs,
    }
    return {name: str(value) for name, value in values.items() if value is not None}


def _drafted(k: NumDraftTokens, temperature: float, drafter: Drafter) -> Speculation:
    if not temperature:  # there is no rule to choose, and no distribution travels
        return Speculation(num_draft_tokens=k, drafter=drafter)
    rule, encoding = AcceptanceRule.REJECTION, DraftLogprobs.AUTO
    return Speculation(num_draft_tokens=k, drafter=drafter, acceptance=rule, draft_logprobs=encoding)


def _trees(k: int, temperature: float) -> dict[str, Speculation]:
    """Return small trees, no deeper than the chain, then trees as deep: each with more guesses at the first tokens
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


def _coupled(options: Speculation) -> Speculation:
    return replace(options, draft_logprobs=None, acceptance=AcceptanceRule.COUPLED)


def _encoded_and_coupled(k: int) -> dict[str, Speculation]:
    simplest = chain(k, temperature=1.0)
    topk = replace(simplest, draft_logprobs=DraftLogprobs.TOPK, draft_topk=TOPK)
    return {
        f"{chain_name(k)}, full": replace(simplest, draft_logprobs=DraftLogprobs.FULL),
        f"{chain_name(k)}, topk:{TOPK}": topk,
        f"{chain_name(k)}, coupled": _coupled(simplest),
    }


def environment(settings: dict[str, str]) -> str:
    """Return the settings as variables before a shell's command."""
    return " ".join(f"OUTRIDER_GATEWAY_{name.upper()}={value}" for name, value in settings.items())
