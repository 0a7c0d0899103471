"""The speculation settings that `outrider tune` compares, and the gateway's settings that make each the default."""

from __future__ import annotations

from collections.abc import Iterable

from outrider.client import AcceptanceRule, Drafter, DraftLogprobs, Speculation
from outrider.wire.requests.speculation import AUTO, NumDraftTokens
from outrider.wire.settings.config import GatewayConfig

PLAIN = "plain"
"""Name of plain decoding among the compared settings."""
_TABLE_K = 8
"""K with which drafters without a draft worker are measured in addition to the model's best K, since their draft tokens
take almost no time."""
_MAX_DRAFT_TOKENS: int = GatewayConfig.model_fields["max_draft_tokens"].default


def chain_name(k: int) -> str:
    """Return the name of the setting in which the draft model proposes chains of `k` tokens (0: plain decoding)."""
    if not k:
        return PLAIN
    return f"K = {k}"


def chain(k: int, temperature: float) -> Speculation:
    """Return the options of a request whose draft tokens are chains of `k` tokens from the draft model, accepted by the
    rule `rejection` (at temperature 0: by greedy acceptance). k = 0 gives plain decoding.

    temperature: the sampling temperature of the request.
    """
    if not k:
        return Speculation(enabled=False)
    return _drafted(k, temperature, Drafter.MODEL)


def chains(ks: Iterable[int], temperature: float) -> dict[str, Speculation]:
    """Return one setting of speculation for each K in `ks`: chains of K tokens from the draft model. The keys are the
    settings' names (`chain_name`), the values the options of a request.

    temperature: the sampling temperature of the requests, which decides the acceptance rule.
    """
    return {chain_name(k): chain(k, temperature) for k in ks}


def compared_drafters(k: int, max_k: int, temperature: float, offered: Iterable[Drafter]) -> dict[str, Speculation]:
    """Return the speculation options of all settings to compare, by name. The simplest comes first: plain decoding,
    drafters that need no draft worker, `auto`, the draft model, and drafters that combine the model with others.

    k: the draft model's best K. max_k: largest allowed K. offered: drafters that the gateway reports as available.
    """
    alone = list[Drafter]()
    with_draft = list[Drafter]()
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
    """Return whether a request with these options uses a draft worker if one is connected."""
    return options.enabled and options.drafter is not None and Drafter(options.drafter).uses_draft_worker


def max_draft_tokens(k: int) -> int:
    """Return the value of the gateway's setting `max_draft_tokens` that allows chains of `k` tokens: `k` or the
    default, whichever is larger.
    """
    return max(k, _MAX_DRAFT_TOKENS)


def gateway_settings(options: Speculation) -> dict[str, str]:
    """Return the gateway's settings, by name, that make these options the default of every request."""
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
    """Return settings of a gateway as environment variables (NAME=value ...) to write before a command in a shell."""
    return " ".join(f"OUTRIDER_GATEWAY_{name.upper()}={value}" for name, value in settings.items())
