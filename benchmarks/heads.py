"""Draft heads beside the demo draft: acceptance by position, tokens a pass, and speed over plain decoding.

    make bench-heads                                  # or: python -m benchmarks.heads --help

Each draft has a target, and a gateway, of its own: a target makes rows for every head that is registered there, and no
arm is to pay for another's. Only one of them works at a time. Each prompt is answered by every arm in turn before the
next one, in another order each time.

Counts are of the demo target and of turns (`tests.turns_gateway`): there a proposal begins at the last committed
token with all that the draft may know of it, and has all its K tokens whatever the machine. Speeds are of the widened
target, and of rounds as they are served: the draft works beside the target, and K goes by what pays.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from benchmarks.arms import PROMPT_TOKENS, Cell, per_pass, speed
from benchmarks.common import DEMO_DRAFT, DEMO_EAGLE3, DEMO_MEDUSA, DEMO_TARGET, Report, dev_prompts, head_at, parser
from benchmarks.common import widened as widened_target
from benchmarks.overlap.checkouts import this_checkout
from benchmarks.overlap.systems import Split, split
from benchmarks.passes import Ratio, Sample, in_turn_at, run_pass
from benchmarks.widen_head import widen_head
from outrider.client import AsyncClient, Drafter, Speculation
from outrider.wire.processes.processes import Child
from outrider.wire.requests.speculation import AUTO, NumDraftTokens

PLAIN, MODEL, EAGLE3, MEDUSA, MEDUSA_INSIDE = "plain", "model", "EAGLE-3", "Medusa", "Medusa in the target"
NGRAM, NGRAM_EAGLE3 = "ngram", "ngram+EAGLE-3"


@dataclass(frozen=True)
class Arm:
    """A way to draft."""

    pair: str
    """Whose target and draft it uses: MODEL, EAGLE3 or MEDUSA."""
    speculation: Speculation


ARMS: Mapping[str, Arm] = {
    PLAIN: Arm(MODEL, Speculation(enabled=False)),
    MODEL: Arm(MODEL, Speculation(drafter=Drafter.MODEL)),
    EAGLE3: Arm(EAGLE3, Speculation(drafter=Drafter.MODEL)),
    MEDUSA: Arm(MEDUSA, Speculation(drafter=Drafter.MODEL)),
    MEDUSA_INSIDE: Arm(MEDUSA, Speculation(drafter=Drafter.HEADS)),
    NGRAM: Arm(MODEL, Speculation(drafter=Drafter.NGRAM)),
    NGRAM_EAGLE3: Arm(EAGLE3, Speculation(drafter=Drafter.NGRAM_MODEL)),
}
PAIR_S = 120.0
"""Seconds that a draft may take until it drafts, its test included. Doubled, one that never does is told of later."""
WARM_TOKENS = 16


@dataclass(frozen=True)
class Folders:
    """A target, and what drafts for it."""

    target: Path
    eagle3: Path
    medusa: Path
    draft: Path = DEMO_DRAFT


@contextlib.contextmanager
def widened(folders: Folders, size: str) -> Iterator[Folders]:
    """Yield the same at the cost of a larger target."""
    target = widened_target(size)
    with tempfile.TemporaryDirectory() as place:
        heads = {name: Path(place) / name for name in ("eagle3", "medusa")}
        for name, folder in heads.items():
            widen_head(getattr(folders, name), folders.target, target, folder)
        yield replace(folders, target=target, **heads)


@contextlib.asynccontextmanager
async def pairs(folders: Folders, gateway_module: str = "gateway") -> AsyncIterator[dict[str, Split]]:
    """Run the systems of all arms, each of which drafts by then."""
    of_head = ("--target-model", str(folders.target))
    wanted: dict[str, tuple[Path, dict[str, Sequence[str]]]] = {
        MODEL: (folders.draft, {}),
        EAGLE3: (folders.eagle3, {"draft": of_head}),
        MEDUSA: (folders.medusa, {"draft": of_head, "target": ("--heads", str(folders.medusa))}),
    }
    async with contextlib.AsyncExitStack() as stack:
        found = dict[str, Split]()
        for name, (draft, more) in wanted.items():
            system = split(this_checkout(), folders.target, draft, more=more, gateway_module=gateway_module)
            found[name] = await stack.enter_async_context(system)
        for name, arm in ARMS.items():
            if name != PLAIN:
                pair = found[arm.pair]
                await until_drafted(name, pair.near.client, arm.speculation, pair.draft)
        yield found


async def until_drafted(name: str, client: AsyncClient, speculation: Speculation, draft: Child) -> None:
    """Return once something is drafted, which warms the pair. End this process where nothing is: the draft's log says
    why.
    """
    give_up = time.monotonic() + PAIR_S
    fixed = replace(speculation, num_draft_tokens=2)
    while time.monotonic() < give_up:
        sample = await run_pass(
            client,
            dev_prompts(2),
            concurrency=1,
            temperature=0.0,
            max_tokens=WARM_TOKENS,
            speculation=fixed,
        )
        if any(item.num_drafted for item in sample.rounds):
            return
        await asyncio.sleep(0.5)
    sys.exit(f"{name} drafts nothing; the draft's log:\n" + "\n".join(draft.last_lines(30)))


async def answered(
    found: Mapping[str, Split],
    num_prompts: int,
    num_drafts: int | None,
    temperature: float,
    max_tokens: int,
    repetitions: int,
) -> dict[str, Cell]:
    """Let all arms answer, or where K (num_drafts) is given all that draft, with that K, else as many as pay."""
    tokenizer = Tokenizer.from_file(str(DEMO_TARGET / "tokenizer.json"))
    names = [name for name in ARMS if num_drafts is None or name != PLAIN]
    k: NumDraftTokens = AUTO if num_drafts is None else num_drafts
    arms = {
        name: ARMS[name].speculation if name == PLAIN else replace(ARMS[name].speculation, num_draft_tokens=k)
        for name in names
    }
    samples = await in_turn_at(
        {name: found[ARMS[name].pair].near.client for name in names},
        [tokenizer.encode(text).ids[-PROMPT_TOKENS:] for text in dev_prompts(num_prompts)],
        arms,
        temperature=temperature,
        max_tokens=max_tokens,
        repetitions=repetitions,
    )
    return {name: Cell(name, each) for name, each in samples.items()}


def kept_at(samples: Sequence[Sample], position: int) -> list[float]:
    """Return 1 or 0 for each proposal with a token at that position (from 1 on), and all before it kept: whether it
    was kept.
    """
    return [
        float(item.num_accepted >= position)
        for sample in samples
        for item in sample.rounds
        if item.num_drafted >= position and item.num_accepted >= position - 1
    ]


def acceptance(cell: Cell, position: int) -> Ratio | None:
    """Return the share that was kept, with its interval over prompts; None where nothing was drafted there."""
    by_prompt = [kept for samples in cell.by_prompt if (kept := kept_at(samples, position))]
    return Ratio.of(by_prompt, np.mean) if by_prompt else None


def more_at_first(cell: Cell, other: Cell) -> Ratio:
    """Return by how much more of a cell's first draft tokens are kept than of another's, prompt by prompt."""
    by_prompt = [
        [float(np.mean(one) - np.mean(two))]
        for samples, others in zip(cell.by_prompt, other.by_prompt, strict=True)
        if (one := kept_at(samples, 1)) and (two := kept_at(others, 1))
    ]
    return Ratio.of(by_prompt, np.mean)


def add_counts(report: Report, temperature: float, cells: Mapping[str, Cell], num_drafts: int) -> list[str]:
    """Add the table of a temperature. Return what is wrong: EAGLE-3's first token no better than the demo draft's."""
    positions = range(1, num_drafts + 1)
    rows = []
    for name, cell in cells.items():
        shares = [acceptance(cell, position) for position in positions]
        passes = Ratio.of([[per_pass(sample) for sample in each] for each in cell.by_prompt], np.mean)
        rows.append([name, *("" if share is None else str(share) for share in shares), str(passes)])
    more = more_at_first(cells[EAGLE3], cells[MODEL])
    where = f"T = {temperature:g}"
    report.table(f"{where}: share kept by position", ("arm", *map(str, positions), "tokens a pass"), rows)
    report.text(f"Of first tokens, {EAGLE3} has {more} more kept than {MODEL}, prompt by prompt.")
    report.data[f"counts, {where}"] = {
        name: [[[item.num_drafted, item.num_accepted] for sample in each for item in sample.rounds] for each in prompts]
        for name, prompts in ((name, cell.by_prompt) for name, cell in cells.items())
    }
    return [] if more.low > 0 else [f"{where}: {EAGLE3} has {more} more of first tokens kept than {MODEL}, not above 0"]


def add_speeds(report: Report, temperature: float, cells: Mapping[str, Cell]) -> None:
    rows = []
    for name, cell in cells.items():
        over = [
            "" if name in (PLAIN, base) else str(cell.over(cells[base], value))
            for base, value in ((PLAIN, speed), (MODEL, speed), (MODEL, per_pass))
        ]
        rows.append([*cell.row, *over])
    columns = ("arm", "drafted a pass", "kept", "tokens a pass", "tok/s")
    ratios = (f"speed over {PLAIN}", f"speed over {MODEL}", f"tokens a pass over {MODEL}")
    report.table(f"T = {temperature:g}: speed on the widened target", (*columns, *ratios), rows)
    report.data[f"speeds, T = {temperature:g}"] = {name: cell.data(per_pass, speed) for name, cell in cells.items()}


async def measure(report: Report, folders: Folders, options: argparse.Namespace) -> list[str]:
    wrong = list[str]()
    async with pairs(folders, "tests.turns_gateway") as found:
        for temperature in options.temperatures:
            cells = await answered(found, options.prompts, options.k, temperature, options.max_tokens, 1)
            wrong += add_counts(report, temperature, cells, options.k)
    with widened(folders, options.size) as wide:
        async with pairs(wide) as found:
            await answered(found, 1, None, 0.0, options.max_tokens, 1)  # what pays is learnt from steps
            for temperature in options.temperatures:
                how = (options.timed_prompts, None, temperature, options.max_tokens, options.repetitions)
                add_speeds(report, temperature, await answered(found, *how))
    return wrong


def main() -> int:
    made = parser(
        __doc__,
        size="94M",
        temperatures=[0.0, 0.7, 1.0],
        k=4,
        prompts=48,
        timed_prompts=12,
        max_tokens=96,
        repetitions=2,
    )
    made.add_argument("--eagle3", type=Path, default=DEMO_EAGLE3, help="folder of the EAGLE-3 head")
    made.add_argument("--medusa", type=Path, default=DEMO_MEDUSA, help="folder of Medusa's heads")
    options = made.parse_args()
    folders = Folders(DEMO_TARGET, head_at(options.eagle3, "eagle3"), head_at(options.medusa, "medusa"))
    report = Report("heads", "Draft heads beside a draft model")
    report.text(
        f"The demo target, float32, drafts and target a core each; held-apart prompts, one answer at a time, "
        f"{options.max_tokens} tokens each. Counts: {options.prompts} prompts, K = {options.k}, by turns; a share is "
        "of the proposals with a token at that position whose tokens before it were all kept. Speeds: "
        f"{options.timed_prompts} prompts, the target WIDENED to {options.size} and the heads with it, K as served, "
        f"{options.repetitions} repetitions. In brackets the interval of 95 % from a bootstrap over prompts."
    )
    wrong = asyncio.run(measure(report, folders, options))
    report.verdict(wrong, f"No violation: {EAGLE3} has more of its first tokens kept than {MODEL}.")
    report.write(options.results)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
