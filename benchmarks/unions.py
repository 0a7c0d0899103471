"""Several sources in one tree beside each of them alone: tokens a pass, and speed over plain decoding.

    make bench-unions                                 # or: python -m benchmarks.unions --help

The sources are the demo draft, an EAGLE-3 head, and n-grams and lookups in the target. Drafts of one target stand
behind gateways of their own, so that an answer has the drafts of its arm. A target makes rows for every head that is
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
from benchmarks.overlap.systems import ended_with_block, started, told
from benchmarks.passes import in_turn_at
from benchmarks.widen_head import widen_head
from outrider.client import AsyncClient, Drafter, Speculation

MODEL, HEAD = "model", "EAGLE-3"
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
        own = {Drafter.NGRAM_AND_MODEL: [Drafter.NGRAM.value], Drafter.LOOKUP_AND_MODEL: [Drafter.LOOKUP.value]}
        return [*self.drafts, *own.get(self.drafter, ())]


ALONE: Mapping[str, Arm] = {
    MODEL: Arm((MODEL,), Drafter.MODEL),
    HEAD: Arm((HEAD,), Drafter.MODEL),
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


@contextlib.asynccontextmanager
async def clients(target: Path, head: Path) -> AsyncIterator[dict[tuple[str, ...], AsyncClient]]:
    """Run the workers, and yield a client by the drafts that an answer has there."""
    first, last, common = 0, 1, ("--dtype", "float32", "--no-prefix-caching", "--metrics-port", "0")
    async with contextlib.AsyncExitStack() as stack:
        children = stack.enter_context(ended_with_block([]))

        async def worker(module: str, model: Path, core: int, *more: str) -> str:
            args = ["--model", str(model), "--cpu-cores", str(core), *common, *more]
            children.append(started(this_checkout(), module, args, [core]))
            return str((await asyncio.to_thread(told, children[-1]))["address"])

        drafts = {
            MODEL: await worker("draft_service", DEMO_DRAFT, first),
            HEAD: await worker("draft_service", head, first, "--target-model", str(target)),
        }
        targets = {has_head: await worker("target_service", target, last) for has_head in (False, True)}
        found = dict[tuple[str, ...], AsyncClient]()
        for names in sorted({arm.drafts for arm in ARMS.values()}):
            of_arm = ";".join(drafts[name] for name in names)
            args = ["--target", targets[HEAD in names], "--draft", of_arm, "--port", "0", "--grpc-port", "0"]
            children.append(started(this_checkout(), "gateway", args, [first]))
            ready = await asyncio.to_thread(told, children[-1])
            found[names] = await stack.enter_async_context(AsyncClient(str(ready["grpc"])))
        for name, arm in ARMS.items():
            await until_drafted(name, found[arm.drafts], Speculation(drafter=arm.drafter), children[0])
        yield found


def in_each(name: str) -> str:
    return f"{name}, K = {NUM_DRAFT_TOKENS}"


async def answered(
    found: Mapping[tuple[str, ...], AsyncClient], options: argparse.Namespace, temperature: float
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
        at,
        [tokenizer.encode(each.text).ids[-PROMPT_TOKENS:] for each in read_prompts(HELD_OUT)[: options.prompts]],
        wishes,
        temperature=temperature,
        max_tokens=options.max_tokens,
        repetitions=options.repetitions,
    )
    return {name: Cell(name, each) for name, each in samples.items()}


async def measure(report: Report, target: Path, head: Path, options: argparse.Namespace) -> list[str]:
    """Fail where, greedy and with K drafts of each, a union makes fewer tokens a pass than one of its sources."""
    wrong = list[str]()
    async with clients(target, head) as found:
        for temperature in options.temperatures:
            cells = await answered(found, options, temperature)
            columns = ("arm", "drafted a pass", "kept", "tokens a pass", "tok/s", "speed over plain")
            over = {name: "" if name == PLAIN else str(cell.over(cells[PLAIN], speed)) for name, cell in cells.items()}
            heading = f"T = {temperature:g}"
            report.table(heading, columns, [[*cell.row, over[name]] for name, cell in cells.items()])
            report.data[heading] = {
                name: {
                    value.__name__: [[value(sample) for sample in each] for each in cell.by_prompt]
                    for value in (per_pass, speed)
                }
                for name, cell in cells.items()
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
        "brackets the interval of 95 % from a bootstrap over prompts."
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
