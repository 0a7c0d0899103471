"""Panels of the overview: who serves, how busy each is, and the processes."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import DashboardLink

from deploy.grafana.panels import BYTES, PER_S, PLAIN, SHARE, Panel, Query, lines, rows
from deploy.grafana.promql import rate

DETAILS = "/d/outrider-worker?${__url_time_range}&var-member=${__field.labels.member}"


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
            [Query("sum by (pool, member) (outrider_member_requests)", "{{pool}} {{member}}")],
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
            width=6,
            link=details,
        ),
        lines(
            "Launcher",
            "Gateways that have joined its registry. The others go on with the workers that they knew.",
            [Query("sum by (registry) (outrider_registry_connected)", "{{registry}}")],
            PLAIN,
            width=6,
        ),
        lines(
            "Retries",
            "Rounds done again, by why. lost: the target's stream ended. fault: it failed. slot, behind: it knew the "
            "slot no more, or less of it. full, draining: the request went to another target.",
            [Query(f"sum by (reason) ({rate('outrider_retries_total')})", "{{reason}}")],
            PER_S,
            width=6,
        ),
        lines(
            "Open breakers",
            "Gateways that leave a worker alone for a while because it failed repeatedly.",
            [Query("sum by (member) (outrider_breaker_open)", "{{member}}")],
            PLAIN,
            width=6,
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
