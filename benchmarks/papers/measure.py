"""Measure our pairs as Leviathan, Kalman and Matias (2023) measured theirs: laws, costs and speeds, for `make papers`.

    make bench-papers                                 # or: python -m benchmarks.papers.measure --help

Laws: each drafter's law is compared with the target's at every token that the target writes, as by `outrider alpha`.
Speeds: one answer at a time, target and draft served on a core each; each prompt is answered plain and with every gamma
and lenience before the next one is. c: a plain step of the draft, served by itself on its core, over one of the target.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.alpha import CODE, text_of
from benchmarks.common import (
    DEMO_DRAFT,
    DEMO_TARGET,
    REPO,
    TRANSLATION,
    Report,
    dev_prompts,
    num_parameters,
    parser,
    translation_drafts,
    widened,
)
from benchmarks.papers.published import LENIENCES
from benchmarks.papers.stored import NAME, TEMPERATURES, Arm, Law, Measured, PairSpeeds, Study, TaskLaws
from benchmarks.running import running
from models.translation.pair import TEXT_SENTENCES, make_grammar, text_to_count_in
from outrider.cli.demo.demo_runs import read_prompts
from outrider.client import AsyncClient, Drafter, Speculation
from outrider.lab.alpha import drafter_of, measured
from outrider.lab.tuning.costs import costs_of
from outrider.lab.tuning.runs import Pass, Workload, run_interleaved
from outrider.lab.tuning.settings import chain
from outrider.wire.processes.processes import StopFlag

GAMMAS = (3, 5, 7)
COUNTED = ("unigram", "bigram")
ANSWER_TIMEOUT_S = 300.0
"""Seconds that one answer may take. Doubled, one that hangs is told of twice as late."""


@dataclass(frozen=True)
class Task:
    """Prompts, and the target that answers them."""

    name: str
    target_name: str
    target: Path
    """The cheapest target with these logits: its laws are compared."""
    prompts: Sequence[str]
    text: Path
    """File that unigram and bigram are counted in."""
    text_name: str


@dataclass(frozen=True)
class Pair:
    """A row of Tables 2 and 4."""

    task: Task
    target_name: str
    target: Path
    draft_name: str
    draft: Path | None
    """None for a drafter without a model, of that name, in the target."""


def pairs(size: str, folder: Path) -> list[Pair]:
    """Return our pairs; those of a task are neighbours. size: of the widened target. folder: to write texts into."""
    code, num_files = text_of([REPO / each for each in CODE])
    code_name = f"{num_files} files of {', '.join(CODE)}, {len(code)} characters"
    python = Task("Python", "demo target", DEMO_TARGET, dev_prompts(48), _written(folder / "code", code), code_name)
    translations = text_to_count_in(make_grammar())
    translation = Task(
        "translation",
        "translation target",
        TRANSLATION / "target",
        read_prompts(TRANSLATION / "prompts.jsonl"),
        _written(folder / "translations", translations),
        f"{TEXT_SENTENCES} sentences of the pair's grammar, {len(translations)} characters",
    )
    return [
        Pair(python, python.target_name, DEMO_TARGET, "demo draft", DEMO_DRAFT),
        Pair(python, f"demo target widened to {size}", widened(size), "demo draft", DEMO_DRAFT),
        *(Pair(translation, translation.target_name, translation.target, each, None) for each in COUNTED),
        *(
            Pair(translation, translation.target_name, translation.target, f"translation {each.name}", each)
            for each in translation_drafts()
        ),
    ]


def _written(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def laws(task: Task, drafts: Mapping[str, Path], options: argparse.Namespace) -> TaskLaws:
    """Compare the laws of unigram and bigram, and of the drafts, by name, with the target's."""
    drafters = {kind: drafter_of(f"{kind}:{task.text}") for kind in COUNTED}
    drafters |= {name: drafter_of(f"model:{draft}") for name, draft in drafts.items()}
    order: dict[str, Any] = {
        "target": str(task.target),
        "drafters": list(drafters.values()),
        "prompts": task.prompts[: options.law_prompts],
        "max_tokens": options.law_tokens,
        "settings": [{"temperature": temperature} for temperature in TEMPERATURES],
        "dtype": "float32",
        "device": "cpu",
        "leniences": LENIENCES,
    }
    rows = measured(order, Console(stderr=True))
    names = itertools.cycle(drafters)  # a setting's rows are in the order of its drafters
    found = [Law.of(row, name) for row, name in zip(rows, names, strict=False)]
    num_tokens = {row["setting"]["temperature"]: row["num_tokens"] for row in rows}
    return TaskLaws(task.name, task.target_name, task.text_name, num_tokens, found)


@contextmanager
def served(target: Path, cores: str, draft: tuple[Path, str] | None = None, **settings: str) -> Iterator[str]:
    """Run a target on its cores, and a draft on others. settings: of the target. Yield the gateway's address."""
    common = {"dtype": "float32", "device": "cpu"}
    with running(
        {"model": str(target), "cpu_cores": cores, **common, **settings},
        None if draft is None else {"model": str(draft[0]), "cpu_cores": draft[1], **common},
    ) as endpoints:
        yield endpoints.grpc


async def passes(
    address: str, prompts: Sequence[str], temperature: float, arms: Mapping[str, Speculation], options: Any
) -> dict[str, list[Pass]]:
    """Return the answers of each arm, a pass a repetition."""
    async with AsyncClient(address) as client:
        (model,) = await client.models()
        load = Workload(
            prompts, options.max_tokens, {"temperature": temperature}, model.id, ANSWER_TIMEOUT_S, StopFlag()
        )
        return await run_interleaved(client, load, arms, range(options.repetitions), lambda: None)


def speculations(temperature: float, drafter: Drafter) -> dict[tuple[int, float], Speculation]:
    """Return plain decoding, every gamma, and the largest under every lenience, by gamma and lenience."""
    found = {(gamma, 1.0): replace(chain(gamma, temperature), drafter=drafter) for gamma in GAMMAS}
    found = {(0, 1.0): chain(0, temperature), **found}
    most = GAMMAS[-1]
    return found | {
        (most, lenience): replace(found[most, 1.0], lenience=lenience) for lenience in LENIENCES if lenience < 1
    }


def arm(gamma: int, lenience: float, found: Sequence[Pass], max_tokens: int) -> Arm:
    """Sum up the answers of an arm. Raises ConfigError where they are too short to tell a round's cost."""
    answers = [answer for each in found for answer in each.answers]
    rounds = [round_ for answer in answers for round_ in answer.rounds]
    full = [1.0 + round_.num_accepted for round_ in rounds if gamma and round_.num_drafted == gamma]
    by_prompt = zip(*(each.answers for each in found), strict=True)
    return Arm(
        gamma,
        lenience,
        answers=[[(each.num_tokens, sum(each.gaps_s)) for each in own] for own in by_prompt],
        decoded_per_s=sum(answer.num_tokens - len(answer.rounds[0].tokens) for answer in answers)
        / sum(sum(answer.gaps_s[1:]) for answer in answers),
        num_passes=len(rounds),
        num_drafted=sum(round_.num_drafted for round_ in rounds),
        full_round=statistics.fmean(full) if full else None,
        cost=costs_of({gamma: found}, max_tokens).by_k[gamma],
    )


def speeds(pair: Pair, options: argparse.Namespace) -> PairSpeeds:
    """Serve the draft by itself, then the pair, and time both. What is counted costs no time by itself: c is 0."""
    cores = sorted(os.sched_getaffinity(0))
    first, last = str(cores[0]), str(cores[-1])
    prompts = pair.task.prompts[: options.prompts]
    step_s = dict.fromkeys(TEMPERATURES, 0.0)
    if pair.draft is not None:
        with served(pair.draft, first) as address:
            for temperature in TEMPERATURES:
                found = asyncio.run(passes(address, prompts, temperature, {"plain": chain(0, temperature)}, options))
                step_s[temperature] = costs_of({0: found["plain"]}, options.max_tokens).step_s
        drafter, system = Drafter.MODEL, served(pair.target, last, (pair.draft, first))
    else:
        drafter, system = Drafter(pair.draft_name), served(pair.target, last, drafter_text=str(pair.task.text))
    studies = []
    with system as address:
        for temperature in TEMPERATURES:
            arms = {str(key): (key, each) for key, each in speculations(temperature, drafter).items()}
            asked = {name: each for name, (_, each) in arms.items()}
            found = asyncio.run(passes(address, prompts, temperature, asked, options))
            made = [arm(*key, found[name], options.max_tokens) for name, (key, _) in arms.items()]
            studies.append(Study(temperature, step_s[temperature], made))
    return PairSpeeds(
        pair.task.name,
        pair.target_name,
        pair.draft_name,
        num_parameters(pair.target),
        0 if pair.draft is None else num_parameters(pair.draft),
        studies,
    )


def add_laws(report: Report, found: TaskLaws) -> None:
    columns = ("drafter", "T", *(f"alpha, lenience {lenience:g}" for lenience in LENIENCES))
    rows = [
        [law.drafter, f"{law.temperature:g}", *(f"{law.lenient[lenience]:.3f}" for lenience in LENIENCES)]
        for law in found.laws
    ]
    report.table(f"Laws, {found.task}", columns, rows)


def add_speeds(report: Report, found: PairSpeeds) -> None:
    columns = ("T", "gamma", "lenience", "over plain", "tokens a full round", "round, ms", "wait, ms", "verify, ms")
    rows = [
        [
            f"{study.temperature:g}",
            str(each.gamma),
            f"{each.lenience:g}",
            str(study.speed(each)),
            "" if each.full_round is None else f"{each.full_round:.2f}",
            *(f"{1e3 * value:.2f}" for value in (each.cost.round_s, each.cost.wait_s, each.cost.verify_s)),
        ]
        for study in found.studies
        for each in study.arms
    ]
    report.table(f"Speeds, {found.target}, {found.draft}", columns, rows)


def main() -> int:
    made = parser(__doc__, size="94M", prompts=24, max_tokens=64, repetitions=1, law_prompts=48, law_tokens=128)
    made.add_argument("--quick", action="store_true", help="two prompts and few tokens: only that all is measured")
    options = made.parse_args()
    if options.quick:
        options.prompts = options.law_prompts = 2
        options.max_tokens, options.law_tokens = 32, 16
    report = Report(NAME, "Laws, costs and speeds of our pairs, for the tables of Leviathan et al. (2023)")
    report.text(
        f"Laws: {options.law_prompts} prompts, at most {options.law_tokens} tokens of the target each. Speeds: "
        f"{options.prompts} prompts, one answer of at most {options.max_tokens} tokens at a time, float32, a core each "
        f"for target and draft, {options.repetitions} repetitions; in brackets the interval of 95 % from a bootstrap "
        "over prompts. wait: of the target for drafts."
    )
    tasks, served_pairs = list[TaskLaws](), list[PairSpeeds]()
    with tempfile.TemporaryDirectory() as folder:
        found = pairs(options.size, Path(folder))
        for task, own in itertools.groupby(found, key=lambda pair: pair.task):
            tasks.append(laws(task, {each.draft_name: each.draft for each in own if each.draft is not None}, options))
            add_laws(report, tasks[-1])
        for pair in found:
            served_pairs.append(speeds(pair, options))
            add_speeds(report, served_pairs[-1])
    report.data.update(Measured(tasks, served_pairs).to_json())
    report.write(options.results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
