"""The dashboard of the whole system: what users feel, what speculation does, where time goes, who serves."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard

from deploy.grafana import fleet, speculation, variables
from deploy.grafana.frame import framed
from deploy.grafana.panels import PER_S, PLAIN, SECONDS, SHARE, Panel, Query, lines, number
from deploy.grafana.promql import PAIR, quantiles, rate

UID = "outrider-overview"


def dashboard() -> Dashboard:
    return framed(
        "Outrider",
        UID,
        "Disaggregated speculative decoding: the whole system. A worker by itself: Outrider worker.",
        (
            variables.choice("target", "Target", "label_values(spec_acceptance_rate, target)"),
            variables.choice("draft", "Draft", "label_values(spec_acceptance_rate, draft)"),
        ),
        (
            ("At a glance", glance()),
            ("What users feel", service()),
            ("Speculation", speculation.drafts()),
            ("The round", speculation.rounds()),
            ("Workers", fleet.workers()),
            ("API keys", keys()),
            ("Processes", fleet.processes()),
        ),
    )


def glance() -> list[Panel]:
    return [
        number(
            "Tokens",
            "Committed by all targets, a second.",
            Query(f"sum({rate('spec_emitted_tokens_total', PAIR)})", "tokens"),
            PER_S,
        ),
        number(
            "Acceptance",
            "Draft tokens accepted over draft tokens verified in the last 60 s.",
            Query(f"avg(spec_acceptance_rate{{{PAIR}}} >= 0)", "acceptance"),
            SHARE,
            steps=((0, "red"), (0.2, "orange"), (0.4, "green")),
        ),
        number(
            "Tokens a pass",
            "1 without speculation. Above it is what drafts save.",
            Query(
                f"sum({rate('spec_emitted_tokens_total', PAIR)}) / "
                f"(sum({rate('spec_rounds_total', PAIR)}) + sum({rate('spec_plain_steps_total', PAIR)}))",
                "tokens",
            ),
            PLAIN,
            steps=((0, "orange"), (1.2, "green")),
        ),
        number(
            "First token, p95",
            "Admission to first token.",
            Query(quantiles("outrider_time_to_first_token_seconds")[1].expr, "p95"),
            SECONDS,
        ),
        number(
            "Between tokens, p95",
            "A round's time over its tokens.",
            Query(quantiles("outrider_inter_token_seconds")[1].expr, "p95"),
            SECONDS,
        ),
        number("Running", "Answers being decoded.", Query("sum(outrider_running)", "running"), PLAIN),
        number(
            "Waiting",
            "Answers waiting for a place.",
            Query("sum(outrider_queue_depth)", "waiting"),
            PLAIN,
            steps=((0, "green"), (1, "orange"), (100, "red")),
        ),
        number(
            "Alerts",
            "Alerts that fire now.",
            Query('count(ALERTS{alertstate="firing",alertname=~"Outrider.*"}) or vector(0)', "firing"),
            PLAIN,
            steps=((0, "green"), (1, "red")),
        ),
    ]


def service() -> list[Panel]:
    return [
        lines(
            "Time to first token",
            "Admission to first token: the queue, the prompt and a round. Of all models.",
            quantiles("outrider_time_to_first_token_seconds"),
            SECONDS,
        ),
        lines(
            "Time between tokens",
            "A round's time over the tokens it committed.",
            quantiles("outrider_inter_token_seconds"),
            SECONDS,
        ),
        lines(
            "Tokens by kind",
            "accepted: drafted and kept. recovered: the target's own, where it refused a draft token. bonus: the extra "
            "one when all were kept. plain: of a step without drafts.",
            [Query(f"sum by (kind) ({rate('spec_emitted_tokens_total', PAIR)})", "{{kind}}")],
            PER_S,
            stacked=True,
        ),
        lines(
            "Answers by outcome",
            "Ended a second. ok: whole. refused: 429 on arrival. cancelled: its client left. Others: what went wrong.",
            [Query(f"sum by (outcome) ({rate('outrider_requests_total')})", "{{outcome}}")],
            PER_S,
            stacked=True,
        ),
        lines(
            "Running and waiting",
            "Answers being decoded, and waiting for a place, over all gateways.",
            [Query("sum(outrider_running)", "running"), Query("sum(outrider_queue_depth)", "waiting")],
            PLAIN,
            stacked=True,
        ),
        lines(
            "Prompt tokens",
            "Admitted a second, and how many of them the target had in its prefix cache.",
            [
                Query(f"sum({rate('outrider_prompt_tokens_total')})", "prompt"),
                Query(f"sum({rate('outrider_cached_prompt_tokens_total')})", "cached"),
            ],
            PER_S,
        ),
    ]


def keys() -> list[Panel]:
    return [
        lines(
            "Requests by API key",
            "A second, where keys are asked for.",
            [Query(f"sum by (key) ({rate('outrider_key_requests_total')})", "{{key}}")],
            PER_S,
        ),
        lines(
            "Tokens by API key",
            "Prompt and output, a second.",
            [Query(f"sum by (key, kind) ({rate('outrider_key_tokens_total')})", "{{key}} {{kind}}")],
            PER_S,
            stacked=True,
        ),
        lines(
            "Turned away",
            "Requests over a limit of their key, and those without a key that is valid.",
            [
                Query(f"sum by (key, limit) ({rate('outrider_key_limited_total')})", "{{key}} {{limit}}"),
                Query(f"sum by (reason) ({rate('outrider_unauthenticated_total')})", "no key: {{reason}}"),
            ],
            PER_S,
        ),
    ]
