"""The settings that are compared, simplest first, and how a deployment is told of one."""

from __future__ import annotations

from outrider.client import AcceptanceRule, DraftLogprobs, Speculation

PLAIN = "plain"
TOPK = 128


def chain_name(k: int) -> str:
    return f"K = {k}" if k else PLAIN


def chain(k: int, temperature: float) -> Speculation:
    """What is simplest: the draft's next k tokens, by rejection. At temperature 0 there is no rule to choose."""
    if not k:
        return Speculation(enabled=False)
    if not temperature:
        return Speculation(num_draft_tokens=k)
    return Speculation(num_draft_tokens=k, acceptance=AcceptanceRule.REJECTION, draft_logprobs=DraftLogprobs.AUTO)


def chains(ks: tuple[int, ...] | range, temperature: float) -> dict[str, Speculation]:
    return {chain_name(k): chain(k, temperature) for k in ks}


def alternatives(k: int, temperature: float) -> dict[str, Speculation]:
    """By name, simplest first: plain decoding, the chain of k, and what else a round with k drafts may be."""
    found = chains((0, k), temperature)
    if temperature:
        rejection = AcceptanceRule.REJECTION
        full, topk = DraftLogprobs.FULL, DraftLogprobs.TOPK
        found |= {
            f"K = {k}, full": Speculation(num_draft_tokens=k, acceptance=rejection, draft_logprobs=full),
            f"K = {k}, topk:{TOPK}": Speculation(
                num_draft_tokens=k, acceptance=rejection, draft_logprobs=topk, draft_topk=TOPK
            ),
            f"K = {k}, coupled": Speculation(num_draft_tokens=k, acceptance=AcceptanceRule.COUPLED),
        }
    return found


def gateway_settings(speculation: Speculation) -> dict[str, str]:
    """Of the gateway whose every answer is to be so."""
    if not speculation.enabled:
        return {"num_draft_tokens": "0"}
    settings = {"num_draft_tokens": str(speculation.num_draft_tokens)}
    if speculation.acceptance is not None:
        settings["acceptance"] = speculation.acceptance.value
    if speculation.draft_logprobs is not None:
        settings["draft_logprobs"] = speculation.draft_logprobs.value
    if speculation.draft_topk is not None:
        settings["draft_topk"] = str(speculation.draft_topk)
    return settings


def environment(settings: dict[str, str]) -> str:
    """As a shell takes it before a command."""
    return " ".join(f"OUTRIDER_GATEWAY_{name.upper()}={value}" for name, value in settings.items())
