"""Several sources in one tree beside each of them alone: tokens a pass, and speed over plain decoding.

    make bench-unions                                 # or: python -m benchmarks.unions --help

The sources are the demo draft, an EAGLE-3 head, and n-grams and lookups in the target; beside them stands the demo
draft for which n-grams draft, which says the same in fewer passes of its own. Drafts of one target stand behind
gateways of their own, so that an answer has the drafts of its arm. A target makes rows for every head that is
registered there, and no arm is to pay for another's: those with the head have a target of their own. Only one works at
a time. Each prompt is answered by every arm in turn before the next one, in another order each time.

Targets are on the last core, all drafts and gateways on the first. With K named each source drafts so many tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tokenizers import Tokenizer

from benchmarks.arms import PROMPT_TOKENS, Cell, per_pass, speed
from benchmarks.common import DEMO_DRAFT, DEMO_EAGLE3, DEMO_TARGET, HELD_OUT, Report, parser, read_prompts
from benchmarks.common import widened as widened_target
from benchmarks.heads import until_drafted
from benchmarks.overlap.checkouts import this_checkout
from benchmarks.overlap.systems import ended_with_block, started, started_worker, told
from benchmarks.passes import Sample, in_turn_at, phase_shares
from benchmarks.widen_head import widen_head
from outrider.client import AsyncClient, Drafter, Speculation
from tests.stack import read_metrics

MODEL, HEAD, CASCADE = "model", "EAGLE-3", "model, drafted by ngram"
PLAIN, BY_TOKEN = "plain", "model, by token"
NUM_DRAFT_TOKENS = 4
"""K, of each source."""


@dataclass(frozen=True)
class Arm:
    """A way to draft."""

    drafts: tuple[str, ...]
    """Workers that an answer may have."""
    drafter: Drafter

    @property
    def parts(self) -> Sequence[str]:
        """Names of the arms with each of its sources alone."""
        own = {Drafter.NGRAM_AND_MODEL: [Drafter.NGRAM], Drafter.LOOKUP_AND_MODEL: [Drafter.LOOKUP]}
        return [*self.drafts, *own.get(self.drafter, ())]


ALONE: Mapping[str, Arm] = {
    MODEL: Arm((MODEL,), Drafter.MODEL),
    HEAD: Arm((HEAD,), Drafter.MODEL),
    CASCADE: Arm((CASCADE,), Drafter.MODEL),
    "ngram": Arm((MODEL,), Drafter.NGRAM),
    "lookup": Arm((MODEL,), Drafter.LOOKUP),
}
IN_TURN: Mapping[str, Arm] = {
    "ngram+model": Arm((MODEL,), Drafter.NGRAM_MODEL),
    "lookup+model": Arm((MODEL,), Drafter.LOOKUP_MODEL),
}
UNITED: Mapping[str, Arm] = {
    "ngram&model": Arm((MODEL,), Drafter.NGRAM_AND_MODEL),
    "lookup&model": Arm((MODEL,), Drafter.LOOKUP_AND_MODEL),
    "model&EAGLE-3": Arm((MODEL, HEAD), Drafter.MODEL_AND_MODEL),
}
ARMS: Mapping[str, Arm] = {**ALONE, **IN_TURN, **UNITED}
DRAFT_PASSES = 'outrider_worker_batch_size_count{worker="draft"}'


@dataclass(frozen=True)
class Front:
    """A gateway, and where the passes of the drafts behind it are counted."""

    client: AsyncClient
    metrics: Sequence[str]
    """Addresses."""

    def num_draft_passes(self) -> float:
        return sum(read_metrics(f"http://{address}/metrics")[DRAFT_PASSES] for address in self.metrics)


def draft_passes_a_token(sample: Sample) -> float:
    return sample.num_draft_passes / sample.num_tokens


@contextlib.asynccontextmanager
async def fronts(target: Path, head: Path) -> AsyncIterator[dict[tuple[str, ...], Front]]:
    """Run the workers, and yield a gateway by the drafts that an answer has there."""
    first, last = 0, 1
    async with contextlib.AsyncExitStack() as stack:
        children = stack.enter_context(ended_with_block([]))

        async def worker(module: str, model: Path, core: int, *more: str) -> dict[str, str]:
            children.append(started_worker(this_checkout(), module, model, core, *more))
            return await asyncio.to_thread(told, children[-1])

        drafts = {
            MODEL: await worker("draft_service", DEMO_DRAFT, first),
            CASCADE: await worker("draft_service", DEMO_DRAFT, first, "--drafted-by", "ngram"),
            HEAD: await worker("draft_service", head, first, "--target-model", str(target)),
        }
        targets = {has_head: await worker("target_service", target, last) for has_head in (False, True)}
        found = dict[tuple[str, ...], Front]()
        for names in sorted({arm.drafts for arm in ARMS.values()}):
            of_arm = ";".join(drafts[name]["address"] for name in names)
            args = ["--target", targets[HEAD in names]["address"], "--draft", of_arm, "--port", "0", "--grpc-port", "0"]
            children.append(started(this_checkout(), "gateway", args, [first]))
            ready = await asyncio.to_thread(told, children[-1])
            client = await stack.enter_async_context(AsyncClient(str(ready["grpc"])))
            found[names] = Front(client, [drafts[name]["metrics_address"] for name in names])
        for name, arm in ARMS.items():
            await until_drafted(name, found[arm.drafts].client, Speculation(drafter=arm.drafter), children[0])
        yield found


def in_each(name: str) -> str:
    return f"{name}, K = {NUM_DRAFT_TOKENS}"


def waited(cell: Cell) -> str:
    """Return the share of the rounds' time for which the target waited."""
    rounds = [item for each in cell.by_prompt for sample in each for item in sample.rounds]
    return f"{100 * phase_shares(rounds)['deliver']:.0f} %"


async def answered(
    found: Mapping[tuple[str, ...], Front], options: argparse.Namespace, temperature: float
) -> dict[str, Cell]:
    tokenizer = Tokenizer.from_file(str(DEMO_TARGET / "tokenizer.json"))
    wishes, at = {PLAIN: Speculation(enabled=False)}, {PLAIN: found[MODEL,]}
    for name, arm in ARMS.items():
        wish = Speculation(drafter=arm.drafter)
        wishes |= {name: wish, in_each(name): replace(wish, num_draft_tokens=NUM_DRAFT_TOKENS)}
        at |= dict.fromkeys((name, in_each(name)), found[arm.drafts])
    if temperature:  # the rule under lenience, and next to none of it: as trees are decided, one draw after the other
        by_token = Speculation(drafter=Drafter.MODEL, num_draft_tokens=NUM_DRAFT_TOKENS, lenience=1 - 1e-6)
        wishes[in_each(BY_TOKEN)], at[in_each(BY_TOKEN)] = by_token, found[MODEL,]
    samples = await in_turn_at(
        {name: front.client for name, front in at.items()},
        [tokenizer.encode(each.text).ids[-PROMPT_TOKENS:] for each in read_prompts(HELD_OUT)[: options.prompts]],
        wishes,
        temperature=temperature,
        max_tokens=options.max_tokens,
        repetitions=options.repetitions,
        draft_passes={name: front.num_draft_passes for name, front in at.items()},
    )
    return {name: Cell(name, each) for name, each in samples.items()}


async def measure(report: Report, target: Path, head: Path, options: argparse.Namespace) -> list[str]:
    """Fail where, greedy, a union with K drafts of each makes fewer tokens a pass than one of its sources, or a draft
    that is drafted for takes as many passes as alone.
    """
    wrong = list[str]()
    async with fronts(target, head) as found:
        for temperature in options.temperatures:
            cells = await answered(found, options, temperature)
            columns: tuple[str, ...]
            columns = ("arm", "drafted a pass", "kept", "tokens a pass", "tok/s", "waited", "speed over plain")
            over = {name: "" if name == PLAIN else str(cell.over(cells[PLAIN], speed)) for name, cell in cells.items()}
            heading = f"T = {temperature:g}"
            report.table(heading, columns, [[*cell.row, waited(cell), over[name]] for name, cell in cells.items()])
            report.data[heading] = {
                name: cell.data(per_pass, speed, draft_passes_a_token) for name, cell in cells.items()
            }
            compared = list[list[str]]()
            for name, arm in UNITED.items():
                both = cells[in_each(name)]
                for part in (cells[in_each(each)] for each in arm.parts):
                    ratio = both.over(part, per_pass)
                    compared.append([both.name, part.name, str(ratio), str(both.over(part, speed))])
                    if not temperature and ratio.middle <= 1.0:
                        wrong.append(f"{both.name}: {ratio} of the tokens a pass of {part.name}, more than 1 wanted")
            report.table(f"All over one, {heading}", ("all", "one", "tokens a pass", "speed"), compared)
            compared = []
            for cascade, alone in ((cells[each(CASCADE)], cells[each(MODEL)]) for each in (str, in_each)):
                fewer = cascade.over(alone, draft_passes_a_token)
                counts = [f"{cell.mean(draft_passes_a_token):.3f}" for cell in (alone, cascade)]
                rest = [str(cascade.over(alone, value)) for value in (per_pass, speed)]
                compared.append([cascade.name, *counts, str(fewer), *rest])
                if not temperature and fewer.middle >= 1.0:
                    wrong.append(f"{cascade.name}: {fewer} of the draft's passes alone, fewer wanted")
            columns = ("arm", "draft passes a token alone", "drafted for", "ratio", "tokens a pass", "speed")
            report.table(f"A draft that is drafted for over the same alone, {heading}", columns, compared)
    return wrong


def main() -> int:
    options = parser(
        __doc__, size="94M", temperatures=[0.0, 1.0], prompts=24, max_tokens=64, repetitions=2
    ).parse_args()
    target = widened_target(options.size)
    report = Report("unions", "Several sources in one tree")
    report.text(
        f"The demo pair and its EAGLE-3 head, the target WIDENED to {options.size}, float32; {options.prompts} "
        f"prompts, one answer at a time, {options.max_tokens} tokens each, {options.repetitions} repetitions. In "
        "brackets the interval of 95 % from a bootstrap over prompts. Waited: share of the rounds' time for which the "
        "target waits for drafts.\n\n"
        "What a union gains in tokens it pays for in rows and, where K is named, in waiting for the slowest draft: all "
        "drafts share a core here. At a temperature above 0 the draws of several sources are decided one after the "
        f"other, as those of the arm `{BY_TOKEN}` are; those of one chain as a block, of which more is kept."
    )
    with tempfile.TemporaryDirectory() as place:
        head = Path(place) / "eagle3"
        widen_head(DEMO_EAGLE3, DEMO_TARGET, target, head)
        wrong = asyncio.run(measure(report, target, head, options))
    report.verdict(wrong)
    report.write(options.results)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
