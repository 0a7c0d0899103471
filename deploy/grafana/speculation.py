"""Panels of the overview: what drafts bring, and where a round's time goes."""

from __future__ import annotations

from deploy.grafana.panels import BYTES_PER_S, PER_S, PLAIN, SECONDS, SHARE, Panel, Query, buckets, lines
from deploy.grafana.promql import BY_PAIR, PAIR, TOKENS_PER_PASS, quantiles, rate, ratio


def drafts() -> list[Panel]:
    hits = rate("spec_lookup_total", 'result="hit"')
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
            "Heads: shown and done",
            "Draft heads alone. shown: share of a text at which head and target said the same when they were paired. "
            "done: share of first draft tokens that were kept in the last hour. Far apart: the target's weights or the "
            "traffic changed, or the head reads other hidden states than it was trained on.",
            [
                Query('max by (draft) (outrider_worker_head_agreement{draft=~"$draft"})', "{{draft}} shown"),
                Query(
                    f"pair:spec_first_acceptance:ratio_rate1h{{{PAIR}}} and on (draft) outrider_worker_head_agreement",
                    "{{draft}} done ({{target}})",
                ),
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
            "Draft tokens of a step, mean",
            "Draft tokens verified over the target's passes, those without drafts included.",
            [
                Query(
                    f"sum {BY_PAIR} ({rate('spec_draft_tokens_total', PAIR)}) / "
                    f"(sum {BY_PAIR} ({rate('spec_rounds_total', PAIR)}) + "
                    f"sum {BY_PAIR} ({rate('spec_plain_steps_total', PAIR)}))",
                    "{{target}} / {{draft}}",
                )
            ],
            PLAIN,
        ),
        lines(
            "Draft ahead of the target",
            "Share of the steps for which drafts lay ready when the last verdict left. Where it is low, the draft is "
            "too slow, or guesses what the target does not say.",
            [Query(f"sum({hits}) / sum({rate('spec_lookup_total')})", "ready")],
            SHARE,
            most=1,
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
            "left for one. no_draft: none is connected. none_parked: none lay ready. nothing: a drafter without a "
            "model had nothing to say. does_not_pay: to verify what lay ready would make the target slower. refused: "
            "what came broke a rule.",
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
            "Draft tokens that were right and came after their step, over those that were verified.",
            [
                Query(
                    ratio("spec_wasted_tokens_total", "spec_draft_tokens_total", BY_PAIR, PAIR),
                    "{{target}} / {{draft}}",
                )
            ],
            SHARE,
        ),
        lines(
            "Drafts refused, overrun",
            "refused: steps for which drafts came that broke a rule. overrun: tokens made for answers that a stop "
            "string had ended.",
            [
                Query(f"sum({rate('spec_proposals_refused_total')})", "refused"),
                Query(f"sum({rate('spec_overrun_tokens_total')})", "overrun"),
            ],
            PER_S,
        ),
        lines(
            "What became of delivered drafts",
            "Of the nodes that drafts deliver. verified: given to a step. late: right, and after their step. pruned: "
            "the answer went another way. refused: they broke a rule. expired: for no lease.",
            [Query(f"sum by (fate) ({rate('spec_parked_tokens_total')})", "{{fate}}")],
            PER_S,
            stacked=True,
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
            "Mean of rounds with drafts. deliver: the step was held back for drafts. verify: queue, forward and "
            "acceptance in the target. overhead: the rest. The draft drafts beside that.",
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
            "From verdict to verdict, rounds with drafts.",
            quantiles("spec_round_seconds", f'{PAIR},phase="total"'),
            SECONDS,
        ),
        lines(
            "Steps held back",
            "Time that a step waits for drafts, of all answers.",
            quantiles("spec_hold_seconds"),
            SECONDS,
        ),
        lines(
            "Bytes on the wire",
            "gateway_draft, gateway_target: control messages. The others: what drafts deliver to targets, by encoding; "
            "ids only where greedy.",
            [
                Query(f"sum by (link) ({rate('spec_wire_bytes_total')})", "{{link}}"),
                Query(
                    f"sum by (encoding) ({rate('outrider_worker_delivered_bytes_total')})", "draft_target {{encoding}}"
                ),
            ],
            BYTES_PER_S,
        ),
    ]
