"""Settings of earlier versions: each is refused by name, with what to use instead, wherever it is given."""

from __future__ import annotations

from collections.abc import Iterable

from outrider.wire.errors import ConfigError

_WAITS = "leave it out: how long a proposal is waited for follows from what rounds take"
_LOOKUP = "leave it out: lookup matches 2 to 8 tokens, and remembers 65,536"
_MESSAGES = "leave it out: the limit follows from what the messages carry"
_PLACED = "say num_gpus in the settings of that pool"

REMOVED = {
    **{
        f"{part}.lookup_{name}": _LOOKUP for part in ("target", "draft") for name in ("min_n", "max_n", "corpus_tokens")
    },
    **{f"{part}.max_message_bytes": _MESSAGES for part in ("target", "draft", "gateway")},
    "target.verification": "leave it out: proposals are always looked at together, which keeps as many tokens or more",
    "target.max_parked_tickets": "max_parked_bytes",
    "target.parked_ttl_s": "leave it out: what a draft delivered is kept until the target has gone another way",
    "target.parallel_folder": "leave it out: whoever starts the ranks passes it",
    "draft.full_logprobs_budget_bytes": "the gateway's draft_logprobs, full or topk:N",
    "gateway.draft_topk": "draft_logprobs, as in topk:128",
    "gateway.lenience": "speculation.lenience of the requests that want it",
    "gateway.wait_budget_min_ms": _WAITS,
    "gateway.wait_budget_max_ms": _WAITS,
    "gateway.round_timeout_s": "leave it out: a worker is lost after 8 times its longest step, within 4 s to 30 s",
    "gateway.start_timeout_s": "leave it out: a gateway waits 300 s for given addresses, a request 120 s for a target",
    "gateway.trace_sample_ratio": "OTEL_TRACES_SAMPLER=parentbased_traceidratio and OTEL_TRACES_SAMPLER_ARG",
    "ray.target_gpus": _PLACED,
    "ray.draft_gpus": _PLACED,
    "ray.start_timeout_s": "leave it out: workers have 900 s to load",
    "ray.node_timeout_s": "leave it out: machines are waited for 300 s",
    "ray.drain_limit_s": "leave it out: running answers have 300 s to leave a worker that is given up",
    "ray.hung_after_s": "leave it out: a worker that hangs for 30 s is ended",
    "ray.log_format": "gateway.log_format, which is the launcher's, too",
}
"""By process and setting: what to use instead. CHANGELOG.md has the same table."""


def refuse_removed(part: str, names: Iterable[tuple[str, str]]) -> None:
    """Raise ConfigError for the first setting that is gone. names: (setting, how the user wrote it)."""
    for name, written in names:
        instead = REMOVED.get(f"{part}.{name}")
        if instead is not None:
            raise ConfigError(f"{written} is no setting any more; instead: {instead}", param=name)
