"""Panels of the overview: what drafts bring, and where a round's time goes."""

from __future__ import annotations

from deploy.grafana.panels import BYTES_PER_S, PER_S, PLAIN, SECONDS, SHARE, Panel, Query, buckets, lines
from deploy.grafana.promql import BY_PAIR, PAIR, TOKENS_PER_PASS, quantiles, rate, ratio


def drafts() -> list[Panel]:
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
        lines(
            "Planned draft tokens, mean",
            "K of the rounds whose K adapts, those without drafts included: 0 where drafts do not pay.",
            [
                Query(
                    ratio("spec_planned_draft_tokens_sum", "spec_planned_draft_tokens_count", BY_PAIR, PAIR),
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
            "left for one. no_draft: none is connected. does_not_pay: drafts would make the target slower. busy: the "
            "draft has not answered yet. pause: it was late or refused just before. nothing: it had nothing to say. "
            "not_waited: it was only to catch up. late, refused: what became of the proposal.",
            [
                Query(
                    f"sum by (reason) ({rate('spec_plain_steps_total', PAIR)}) / ignoring (reason) group_left () "
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
                    f"sum by (phase) ({phases}) / ignoring (phase) group_left () sum({total})",
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
