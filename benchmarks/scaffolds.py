"""Count what lookahead decoding and PaSS make of the demo target at temperature 0: tokens a pass.

    make bench-scaffolds                              # or: python -m benchmarks.scaffolds --help
    make bench-scaffolds ARGS='--embeddings FOLDER'   # with PaSS: outrider train-head pass makes them

Beside `ngram`, which feeds its drafts alone. All are verified in every step, whatever that costs, so the counts are
those of any machine. What a fed token costs is not: `outrider tune` tries lookahead on yours.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
from dataclasses import dataclass
from typing import Any

from transformers import AutoConfig

from benchmarks.arms import per_pass
from benchmarks.common import DEMO_TARGET, Report, dev_prompts, parser
from benchmarks.passes import Sample, run_pass
from benchmarks.running import running
from outrider.client import AsyncClient, Drafter, Speculation
from outrider.engine.loading.lookahead_embeddings import read_embeddings
from outrider.wire.lookahead_shape import LookaheadShape
from outrider.wire.params import MAX_DRAFT_TOKENS

NGRAM_K = 4
WARM_TOKENS = 16


@dataclass(frozen=True)
class Arm:
    name: str
    speculation: Speculation
    settings: dict[str, str]
    """Of the target."""
    num_scaffolds: int = 0
    """Tokens of a step's scaffold, at most."""


def arms_of(args: argparse.Namespace) -> list[Arm]:
    found = [
        Arm("plain", Speculation(enabled=False), {}),
        Arm(f"ngram, K = {NGRAM_K}", Speculation(drafter=Drafter.NGRAM, num_draft_tokens=NGRAM_K), {}),
    ]
    for text in args.shapes:
        shape = LookaheadShape.parse(text)
        most = shape.most_nodes - shape.num_scaffolds
        wish = Speculation(drafter=Drafter.LOOKAHEAD, num_draft_tokens=most)
        found.append(Arm(f"lookahead {text}", wish, {"lookahead": text}, shape.num_scaffolds))
    if args.embeddings:
        num = len(read_embeddings(args.embeddings, AutoConfig.from_pretrained(DEMO_TARGET).hidden_size))
        wish = Speculation(drafter=Drafter.PASS, num_draft_tokens=num)
        found.append(Arm(f"pass, L = {num}", wish, {"lookahead_embeddings": args.embeddings}, num * (num + 1)))
    return found


def measured(arm: Arm, args: argparse.Namespace) -> Sample:
    """Run a target of its own, and answer all prompts at temperature 0."""

    async def answered(address: str) -> Sample:
        async with AsyncClient(address) as client:
            options: dict[str, Any] = {
                "concurrency": args.concurrency,
                "temperature": 0.0,
                "speculation": arm.speculation,
            }
            prompts = dev_prompts(args.prompts)
            await run_pass(client, prompts[:1], max_tokens=WARM_TOKENS, **options)
            return await run_pass(client, prompts, max_tokens=args.tokens, **options)

    target = {"model": str(DEMO_TARGET), **arm.settings}
    with running(target, None, {"max_draft_tokens": MAX_DRAFT_TOKENS}) as endpoints:
        return asyncio.run(answered(endpoints.grpc))


def main() -> int:
    args = parser(__doc__, shapes=["5,4,5", "10,4,8"], embeddings="", prompts=16, tokens=96, concurrency=1).parse_args()
    report, rows, outputs = Report("scaffolds", "Lookahead decoding and PaSS"), list[tuple[str, ...]](), None
    for arm in arms_of(args):
        sample = measured(arm, args)
        outputs = outputs or sample.outputs
        num_same = sum(map(list.__eq__, sample.outputs, outputs))
        drafted = statistics.fmean(item.num_drafted for item in sample.rounds)
        cells = (f"{per_pass(sample):.2f}", f"{drafted:.1f}", str(arm.num_scaffolds))
        rows.append((arm.name, *cells, f"{num_same} of {args.prompts}"))
        report.data[arm.name] = {"tokens_a_pass": per_pass(sample), "drafted": drafted}
    columns = ("", "tokens a pass", "drafts a step", "scaffold, at most", "texts as without")
    report.table(f"{args.prompts} prompts, {args.tokens} tokens each", columns, rows)
    report.write(args.results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
