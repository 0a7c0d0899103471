"""The drill-down: one worker, or those of a role side by side."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard

from deploy.grafana import variables
from deploy.grafana.frame import framed
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
from deploy.grafana.promql import rate

UID = "outrider-worker"
WORKER = 'worker=~"$role",member=~"$member"'
"""What is chosen above the panels. Prometheus' service discovery gives a worker's series the label member."""
BY_MEMBER = "by (worker, member)"
LEGEND = "{{worker}} {{member}}"


def dashboard() -> Dashboard:
    return framed(
        "Outrider worker",
        UID,
        "One worker, draft or target: what it does, and what it holds.",
        (
            variables.choice("role", "Role", "label_values(outrider_worker_info, worker)"),
            variables.choice("member", "Member", 'label_values(outrider_worker_info{worker=~"$role"}, member)'),
        ),
        (
            ("What it is", what()),
            ("Work", work()),
            ("Memory", memory()),
            ("Proposals", proposals()),
            ("Features", features()),
            ("Process", process()),
        ),
    )


def counted(series: str, by: str = BY_MEMBER) -> str:
    return f"sum {by} ({rate(series, WORKER)})"


def what() -> list[Panel]:
    hidden = ["Time", "Value", "__name__", "job", "worker"]
    return [
        rows(
            "Workers",
            "What they say of themselves.",
            Query(f"outrider_worker_info{{{WORKER}}}", ""),
            hidden,
            width=16,
        ),
        lines(
            "Up",
            "1 while Prometheus can read the worker's metrics.",
            [Query('up{job="outrider-workers",role=~"$role",member=~"$member"}', "{{role}} {{member}}")],
            PLAIN,
        ),
    ]


def work() -> list[Panel]:
    mean = f"{counted('outrider_worker_busy_seconds_total')} / {counted('outrider_worker_batch_size_count')}"
    return [
        lines(
            "Busy share",
            "Share of the time spent in forwards.",
            [Query(counted("outrider_worker_busy_seconds_total"), LEGEND)],
            SHARE,
            most=1,
        ),
        lines("Length of a forward", "Mean.", [Query(mean, LEGEND)], SECONDS),
        lines(
            "Slots stepped",
            "A second. verify and plain: the target's steps with and without drafts. grow: nodes that the draft fed.",
            [Query(counted("outrider_worker_steps_total", by="by (worker, member, kind)"), f"{LEGEND} {{{{kind}}}}")],
            PER_S,
        ),
        buckets(
            "Slots in a forward",
            "Forwards a second by how many slots they served together.",
            f"sum by (le) ({rate('outrider_worker_batch_size_bucket', WORKER)})",
            PLAIN,
        ),
        lines(
            "Tokens in a forward",
            "Median of the forwards that had any: decode is answers under way, prefill prompts.",
            [
                Query(
                    "histogram_quantile(0.5, "
                    f"{counted('outrider_worker_step_tokens_bucket', by='by (worker, member, purpose, le)')})",
                    f"{LEGEND} {{{{purpose}}}}",
                )
            ],
            PLAIN,
        ),
        lines(
            "Truncations",
            "Truncate messages that arrived, by reason, and the KV blocks that they freed.",
            [
                Query(
                    counted("outrider_worker_truncates_total", by="by (worker, member, reason)"),
                    f"{LEGEND} {{{{reason}}}}",
                ),
                Query(counted("outrider_worker_truncate_freed_blocks_total"), f"{LEGEND} blocks freed"),
            ],
            PER_S,
        ),
    ]


def memory() -> list[Panel]:
    return [
        number(
            "KV cache",
            "Blocks in all.",
            Query(f"sum(outrider_worker_kv_blocks{{{WORKER}}})", "blocks"),
            PLAIN,
            width=4,
        ),
        number("Slots", "In all.", Query(f"sum(outrider_worker_slots{{{WORKER}}})", "slots"), PLAIN, width=4),
        number(
            "Prefix hits",
            "Share of prompt tokens that were in the prefix cache.",
            Query(
                f"sum({rate('outrider_worker_prefix_hit_tokens_total', WORKER)}) / "
                f"sum({rate('outrider_worker_prompt_tokens_total', WORKER)})",
                "hits",
            ),
            SHARE,
            width=4,
        ),
        number(
            "Waiting for memory",
            "Slots with work and no KV blocks for it.",
            Query(f"sum(outrider_worker_slots_waiting{{{WORKER}}})", "waiting"),
            PLAIN,
            width=4,
            steps=((0, "green"), (1, "orange")),
        ),
        number(
            "Preempted",
            "Slots a second whose KV blocks were taken for others. Above 0 the cache is too small for the load.",
            Query(f"sum({rate('outrider_worker_preemptions_total', WORKER)})", "preempted"),
            PER_S,
            width=4,
            steps=((0, "green"), (0.1, "orange")),
        ),
        number(
            "Evicted",
            "Cached blocks a second given up for new tokens.",
            Query(f"sum({rate('outrider_worker_prefix_evictions_total', WORKER)})", "evicted"),
            PER_S,
            width=4,
        ),
        lines("Slots in use", "Open slots.", [Query(f"outrider_worker_slots_in_use{{{WORKER}}}", LEGEND)], PLAIN),
        lines(
            "KV blocks",
            "Held by slots, and kept for later prompts.",
            [
                Query(f"outrider_worker_kv_blocks_in_use{{{WORKER}}}", f"{LEGEND} in use"),
                Query(f"outrider_worker_kv_blocks_cached{{{WORKER}}}", f"{LEGEND} cached"),
            ],
            PLAIN,
        ),
        lines(
            "Prompt tokens",
            "Of slots that were fed for the first time, and those of them that the prefix cache had.",
            [
                Query(counted("outrider_worker_prompt_tokens_total"), f"{LEGEND} prompt"),
                Query(counted("outrider_worker_prefix_hit_tokens_total"), f"{LEGEND} cached"),
            ],
            PER_S,
        ),
    ]


def proposals() -> list[Panel]:
    return [
        lines(
            "Sent",
            "Payload of the proposals that drafts sent, by encoding.",
            [
                Query(
                    counted("outrider_worker_delivered_bytes_total", by="by (worker, member, encoding)"),
                    f"{LEGEND} {{{{encoding}}}}",
                )
            ],
            BYTES_PER_S,
        ),
        lines(
            "Refused",
            "By targets: a value, shape, epoch or length was wrong.",
            [Query(counted("outrider_worker_proposals_refused_total"), LEGEND)],
            PER_S,
        ),
        lines(
            "Draft tokens that did not leave",
            "Of drafts: their target reads too slowly. What became of those that did: the overview.",
            [Query(counted("outrider_worker_dropped_draft_tokens_total"), LEGEND)],
            PER_S,
        ),
    ]


def features() -> list[Panel]:
    by_fate = "by (worker, member, peer, fate)"
    legend = f"{LEGEND} {{{{peer}}}} {{{{fate}}}}"
    return [
        lines(
            "Rows of features",
            "For drafts that are heads. sent; dropped for now: the draft reads too slowly (target). received (draft).",
            [Query(counted("outrider_worker_feature_rows_total", by=by_fate), legend)],
            PER_S,
        ),
        lines(
            "Bytes of features",
            "Of the same rows.",
            [Query(counted("outrider_worker_feature_bytes_total", by=by_fate), legend)],
            BYTES_PER_S,
        ),
        lines(
            "Memory of heads",
            "In targets: the maps that open drafts' heads, and the rows kept for drafts that ask late.",
            [
                Query(f'outrider_worker_head_bytes{{worker="target",{WORKER}}}', f"{LEGEND} maps"),
                Query(f'outrider_worker_kept_feature_bytes{{worker="target",{WORKER}}}', f"{LEGEND} rows"),
            ],
            BYTES,
        ),
    ]


def process() -> list[Panel]:
    ours = 'job="outrider-workers",role=~"$role",member=~"$member"'
    legend = "{{role}} {{member}}"
    return [
        lines("Memory", "Resident.", [Query(f"process_resident_memory_bytes{{{ours}}}", legend)], BYTES),
        lines("CPU", "Cores in use.", [Query(rate("process_cpu_seconds_total", ours), legend)], PLAIN),
        lines("Open files", "And sockets.", [Query(f"process_open_fds{{{ours}}}", legend)], PLAIN),
    ]
