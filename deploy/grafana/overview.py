"""The dashboard of the whole system: what users feel, what speculation does, where time goes, who serves."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard, DashboardLink, Row
from grafana_foundation_sdk.models.dashboard import DashboardCursorSync

from deploy.grafana import variables
from deploy.grafana.panels import (
    BYTES,
    BYTES_PER_S,
    PER_S,
    PLAIN,
    SECONDS,
    SHARE,
    Panel,
    Query,
    buckets,
    lines,
    number,
    rows,
)

UID = "outrider-overview"
PAIR = 'target=~"$target",draft=~"$draft"'
"""What is chosen above the panels."""
BY_PAIR = "by (target, draft)"
DETAILS = "/d/outrider-worker?${__url_time_range}&var-member=${__field.labels.member}"


def rate(series: str, labels: str = "") -> str:
    return f"rate({series}{{{labels}}}[$__rate_interval])" if labels else f"rate({series}[$__rate_interval])"


def ratio(part: str, whole: str, by: str = "", labels: str = "") -> str:
    """Of the rates of two counters."""
    space = f"{by} " if by else ""
    return f"sum {space}({rate(part, labels)}) / sum {space}({rate(whole, labels)})"


def quantiles(series: str, labels: str = "") -> list[Query]:
    """p50, p95 and p99 of a histogram over all gateways."""
    inner = f"sum by (le) ({rate(f'{series}_bucket', labels)})"
    return [Query(f"histogram_quantile({q / 100}, {inner})", f"p{q}") for q in (50, 95, 99)]


TOKENS_PER_PASS = (
    f"sum {BY_PAIR} ({rate('spec_emitted_tokens_total', PAIR)}) / "
    f"(sum {BY_PAIR} ({rate('spec_rounds_total', PAIR)}) + "
    f"sum {BY_PAIR} ({rate('spec_plain_steps_total', PAIR)}))"
)
"""A round and a plain step are one pass of the target for one answer each."""


def dashboard() -> Dashboard:
    built = (
        Dashboard("Outrider")
        .uid(UID)
        .description("Disaggregated speculative decoding: the whole system. A worker by itself: Outrider worker.")
        .tags(["outrider"])
        .readonly()
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .refresh("10s")
        .time("now-30m", "now")
        .with_variable(variables.source())
        .with_variable(variables.choice("target", "Target", "label_values(spec_acceptance_rate, target)"))
        .with_variable(variables.choice("draft", "Draft", "label_values(spec_acceptance_rate, draft)"))
        .annotation(variables.firing())
        .link(variables.other_dashboards())
    )
    for title, panels in (
        ("At a glance", glance()),
        ("What users feel", service()),
        ("Speculation", speculation()),
        ("The round", rounds()),
        ("Workers", workers()),
        ("Processes", processes()),
    ):
        built = built.with_row(Row(title))
        for panel in panels:
            built = built.with_panel(panel)
    return built


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
            "Ended a second. ok: whole. refused: 429 at the door. cancelled: its client left. Others: what went wrong.",
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


def speculation() -> list[Panel]:
    return [
        lines(
            "Acceptance by pair",
            "spec_acceptance_rate: accepted over verified draft tokens in the last 60 s, the mean of the gateways. "
            "The bonus token is in neither.",
            [Query(f"avg {BY_PAIR} (spec_acceptance_rate{{{PAIR}}} >= 0)", "{{target}} / {{draft}}")],
            SHARE,
            most=1,
        ),
        lines(
            "Acceptance by position",
            "Share of the draft tokens at a place in their proposal that were kept. 0 is the first; a token is kept "
            "only if all before it were.",
            [
                Query(
                    ratio(
                        "spec_accepted_per_position_total",
                        "spec_drafted_per_position_total",
                        "by (target, draft, position)",
                        PAIR,
                    ),
                    "{{position}} ({{target}} / {{draft}})",
                )
            ],
            SHARE,
            most=1,
        ),
        lines(
            "Tokens a target pass",
            "Committed tokens over rounds and plain steps: what one pass of the target brings an answer.",
            [Query(TOKENS_PER_PASS, "{{target}} / {{draft}}")],
            PLAIN,
        ),
        lines(
            "Accepted length, mean",
            "1 + accepted / rounds: tokens that a round with drafts commits.",
            [
                Query(
                    f"1 + {ratio('spec_accepted_tokens_total', 'spec_rounds_total', BY_PAIR, PAIR)}",
                    "{{target}} / {{draft}}",
                )
            ],
            PLAIN,
        ),
        buckets(
            "Accepted length",
            "Rounds a second by the tokens that they commit.",
            f"sum by (le) ({rate('spec_accepted_length_bucket', PAIR)})",
            PLAIN,
        ),
        lines(
            "Plain steps",
            "Share of the target's passes that had no drafts, by why. off: the request asks for none. end: no room is "
            "left for one. no_draft: none is connected. busy: the draft has not answered yet. pause: it was late or "
            "refused just before. late, refused: what became of the proposal.",
            [
                Query(
                    f"sum by (reason) ({rate('spec_plain_steps_total', PAIR)}) / ignoring (reason) group_left "
                    f"(sum({rate('spec_plain_steps_total', PAIR)}) + sum({rate('spec_rounds_total', PAIR)}))",
                    "{{reason}}",
                )
            ],
            SHARE,
            stacked=True,
            most=1,
        ),
        lines(
            "Wasted drafts",
            "Draft tokens that were never verified, over those that were.",
            [
                Query(
                    ratio("spec_wasted_tokens_total", "spec_draft_tokens_total", BY_PAIR, PAIR),
                    "{{target}} / {{draft}}",
                )
            ],
            SHARE,
        ),
        lines(
            "Proposals that did not count",
            "late: the wait budget ran out. refused: a value, shape, epoch or length was wrong.",
            [
                Query(f"sum({rate('spec_proposals_late_total')})", "late"),
                Query(f"sum({rate('spec_proposals_refused_total')})", "refused"),
            ],
            PER_S,
        ),
        lines(
            "Truncations",
            "Truncate messages by worker and reason.",
            [Query(f"sum by (worker, reason) ({rate('spec_truncate_total')})", "{{worker}} {{reason}}")],
            PER_S,
        ),
    ]


def rounds() -> list[Panel]:
    total = rate("spec_round_seconds_count", f'{PAIR},phase="total"')
    phases = rate("spec_round_seconds_sum", f'{PAIR},phase!="total"')
    return [
        lines(
            "Where a round's time goes",
            "Mean of rounds with drafts. propose: the draft's work. deliver: the wire, and waiting for the proposal. "
            "verify: queue, forward and acceptance in the target. overhead: the rest.",
            [
                Query(
                    f"sum by (phase) ({phases}) / ignoring (phase) group_left sum({total})",
                    "{{phase}}",
                )
            ],
            SECONDS,
            stacked=True,
        ),
        lines(
            "A round",
            "From propose to commit, rounds with drafts.",
            quantiles("spec_round_seconds", f'{PAIR},phase="total"'),
            SECONDS,
        ),
        lines(
            "Bytes on the wire",
            "By link and encoding. draft_target: proposals, ids only where greedy. The others: control messages.",
            [Query(f"sum by (link, encoding) ({rate('spec_wire_bytes_total')})", "{{link}} {{encoding}}")],
            BYTES_PER_S,
        ),
    ]


def workers() -> list[Panel]:
    details = DashboardLink("Worker ${__field.labels.member}").url(DETAILS)
    by_member = "by (role, pool, member)"
    legend = "{{role}} {{member}}"
    return [
        lines(
            "Replicas by state",
            "Members of each pool, as the gateways know them (the most that any of them sees).",
            [
                Query(
                    "max by (pool, role, state) (sum by (instance, pool, role, state) (outrider_members))",
                    "{{pool}} {{state}}",
                )
            ],
            PLAIN,
            stacked=True,
        ),
        lines(
            "Busy share",
            "Share of the time that a worker spends in forwards.",
            [Query(f"sum {by_member} ({rate('outrider_worker_busy_seconds_total')})", legend)],
            SHARE,
            most=1,
            link=details,
        ),
        lines(
            "Requests by member",
            "Answers placed on each worker, over all gateways.",
            [Query("sum by (member) (outrider_member_requests)", "{{member}}")],
            PLAIN,
            stacked=True,
            link=details,
        ),
        lines(
            "Slots in use",
            "Share of a worker's slots that are open.",
            [Query("outrider_worker_slots_in_use / outrider_worker_slots", legend)],
            SHARE,
            most=1,
            link=details,
        ),
        lines(
            "KV cache in use",
            "Share of a worker's KV blocks that slots hold. What is kept for later prompts is free for use.",
            [Query("outrider_worker_kv_blocks_in_use / outrider_worker_kv_blocks", legend)],
            SHARE,
            most=1,
            link=details,
        ),
        lines(
            "Too little memory",
            "Slots that wait for KV blocks, and slots a second that lost theirs to others.",
            [
                Query("outrider_worker_slots_waiting", f"{legend} waiting"),
                Query(f"sum {by_member} ({rate('outrider_worker_preemptions_total')})", f"{legend} preempted"),
            ],
            PLAIN,
            link=details,
        ),
        lines(
            "Connections",
            "Gateways that have a stream to the worker.",
            [Query("sum by (worker, pool, member) (outrider_worker_connected)", "{{worker}} {{member}}")],
            PLAIN,
            link=details,
        ),
        lines(
            "Retries",
            "Rounds done again, by why. lost: the target's stream ended. fault: it failed. slot, behind: it knew the "
            "slot no more, or less of it. full, draining: the request went to another target.",
            [Query(f"sum by (reason) ({rate('outrider_retries_total')})", "{{reason}}")],
            PER_S,
        ),
        lines(
            "Open breakers",
            "Gateways that leave a worker alone for a while because it failed repeatedly.",
            [Query("sum by (member) (outrider_breaker_open)", "{{member}}")],
            PLAIN,
            link=details,
        ),
    ]


def processes() -> list[Panel]:
    legend = "{{job}} {{member}} {{instance}}"
    ours = 'job=~"outrider.*"'
    return [
        rows(
            "Workers that are there",
            "What each says of itself.",
            Query("outrider_worker_info", ""),
            ["Time", "Value", "__name__", "job", "worker"],
            width=8,
        ),
        lines("Memory", "Resident.", [Query(f"process_resident_memory_bytes{{{ours}}}", legend)], BYTES),
        lines("CPU", "Cores in use.", [Query(rate("process_cpu_seconds_total", ours), legend)], PLAIN),
    ]
