"""The settings that `outrider tune` compares, and the gateway's settings for each of them."""

from __future__ import annotations

from collections.abc import Iterable

from outrider.client import AcceptanceRule, Drafter, DraftLogprobs, Speculation
from outrider.wire.requests.speculation import AUTO, NumDraftTokens
from outrider.wire.settings.config import GatewayConfig

PLAIN = "plain"
"""Name of plain decoding among the settings."""
_TABLE_K = 8
"""K of drafters without a draft worker, beside the best K of the model: their draft tokens cost next to nothing."""
_MAX_DRAFT_TOKENS: int = GatewayConfig.model_fields["max_draft_tokens"].default


def chain_name(k: int) -> str:
    """Return the name of the draft model's chain of `k` tokens; PLAIN for 0."""
    if not k:
        return PLAIN
    return f"K = {k}"


def chain(k: int, temperature: float) -> Speculation:
    """Return the options for the draft model's next `k` tokens, by rejection; plain decoding for 0."""
    if not k:
        return Speculation(enabled=False)
    return _drafted(k, temperature, Drafter.MODEL)


def chains(ks: Iterable[int], temperature: float) -> dict[str, Speculation]:
    """Return the options for each K by name."""
    return {chain_name(k): chain(k, temperature) for k in ks}


def compared_drafters(k: int, max_k: int, temperature: float, offered: Iterable[Drafter]) -> dict[str, Speculation]:
    """Return the options for each drafter by name, simplest first: none, those without a draft worker, `auto`, the
    draft model, those that add something to it.

    k: the model's best K. offered: drafters of the deployment.
    """
    alone, with_draft = list[Drafter](), list[Drafter]()
    for drafter in offered:
        # No prompt here has a prediction; `auto` and the model have entries of their own.
        if drafter.needs_prediction or drafter in (Drafter.AUTO, Drafter.MODEL):
            continue
        if drafter.needs_draft_worker:
            with_draft.append(drafter)
        else:
            alone.append(drafter)
    settings = chains((0,), temperature)
    for drafter in alone:
        for table_k in sorted({k, min(_TABLE_K, max_k)}):
            settings[f"{chain_name(table_k)}, {drafter}"] = _drafted(table_k, temperature, drafter)
    settings[f"K = {AUTO}"] = _drafted(AUTO, temperature, Drafter.AUTO)
    settings[chain_name(k)] = chain(k, temperature)
    for drafter in with_draft:
        settings[f"{chain_name(k)}, {drafter}"] = _drafted(k, temperature, drafter)
    return settings


def _drafted(k: NumDraftTokens, temperature: float, drafter: Drafter) -> Speculation:
    if not temperature:  # there is no rule to choose, and no distribution travels
        return Speculation(num_draft_tokens=k, drafter=drafter)
    return Speculation(
        num_draft_tokens=k,
        drafter=drafter,
        acceptance=AcceptanceRule.REJECTION,
        draft_logprobs=DraftLogprobs.AUTO,
    )


def needs_draft(options: Speculation) -> bool:
    """Return whether these options use a draft worker."""
    return options.enabled and options.drafter is not None and Drafter(options.drafter).uses_draft_worker


def max_draft_tokens(k: int) -> int:
    """Return the gateway's setting that allows chains of `k` tokens, and no less than its default."""
    return max(k, _MAX_DRAFT_TOKENS)


def gateway_settings(options: Speculation) -> dict[str, str]:
    """Return the settings of a gateway that has these options as its default."""
    if not options.enabled:
        return {"num_draft_tokens": "0"}
    k = options.num_draft_tokens
    settings = {"num_draft_tokens": str(k)}
    if isinstance(k, int) and k > _MAX_DRAFT_TOKENS:
        settings["max_draft_tokens"] = str(k)
    for name in ("drafter", "acceptance", "draft_logprobs"):
        value = getattr(options, name)
        if value is not None:
            settings[name] = str(value)
    return settings


def environment(settings: dict[str, str]) -> str:
    """Return settings of a gateway as variables to write before a shell's command."""
    return " ".join(f"OUTRIDER_GATEWAY_{name.upper()}={value}" for name, value in settings.items())
