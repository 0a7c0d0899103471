"""Tokens per second of Outrider and of other engines on the same weights, prompts and cores, side by side in one run.

    make bench-peers                                  # or: python -m benchmarks peers --help
    make bench-peers ARGS='--target FOLDER'           # on another model, such as that of models/real

Engines take turns, pass by pass, on the cores of this process (`taskset` gives fewer); other engines are stopped
meanwhile, so that no thread of theirs spins. Outrider is several processes and not stopped: it sleeps when it has no
work. A pass is every prompt once, `concurrency` at a time. Ratios are taken within a repetition. Prefix caches are off
everywhere, so each pass feeds its prompts. The report names the modes that an engine lacks, and marks a rate of wrong
answers or of a useless draft. Without a draft model, engines draft with what they have without one.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import signal
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from tokenizers import Tokenizer

from benchmarks.common import (
    DEMO_DRAFT,
    DTYPE,
    SIZE,
    WORK,
    Option,
    Report,
    dev_prompts,
    num_parameters,
    spread,
    widened,
)
from benchmarks.peers.compare import NEAR_TIE, Difference, Judge
from benchmarks.peers.engines import EngineFailed, EngineProcess, Kind, kinds, missing
from benchmarks.peers.protocol import Answer, Job, Setup
from benchmarks.runner import Benchmark, take_turns

CONTEXT = 1024
"""Tokens of prompt and answer; the longest development prompt has 548."""
OURS = "Outrider"
"""Name of the engine that the others are compared with."""
WITH_DRAFT = ", with draft"
USEFUL = 0.1
"""Least share of drafted tokens accepted; a draft of the demo pair below it does not work as it should."""
WRONG, USELESS = "†", "‡"


@dataclass(frozen=True)
class Setting:
    dtype: str
    temperature: float
    concurrency: int

    def __str__(self) -> str:
        return f"{self.dtype}, T = {self.temperature:g}, concurrency {self.concurrency}"


@dataclass
class Arm:
    """The passes of one engine in one setting, with drafts or without."""

    engine: str
    speculative: bool
    setting: Setting
    answers: list[Answer] = field(default_factory=list)
    """Of each pass, to the first prompts."""
    lacks: str = ""
    """What the engine lacks for it."""
    needs_useful_draft: bool = False
    """Whether its drafts are those of a model, of which some must be accepted."""
    differences: list[Difference] = field(default_factory=list)
    """First tokens of greedy answers that are not the target's own."""

    @property
    def name(self) -> str:
        return f"{self.engine}{WITH_DRAFT * self.speculative}"

    @property
    def rates(self) -> list[float]:
        """Tokens per second of each pass."""
        return [sum(map(len, answer.outputs)) / answer.elapsed_s for answer in self.answers]

    @property
    def num_drafted(self) -> int:
        return sum(answer.num_drafted or 0 for answer in self.answers)

    @property
    def num_accepted(self) -> int:
        return sum(answer.num_accepted or 0 for answer in self.answers)

    @property
    def num_answers(self) -> int:
        return sum(len(answer.outputs) for answer in self.answers)

    @property
    def marks(self) -> str:
        """The marks of rates that must not be compared; empty where they may."""
        marks = ""
        if not all(self.is_near_tie(difference) for difference in self.differences):
            marks += WRONG
        if self.needs_useful_draft and self.num_accepted < USEFUL * self.num_drafted:
            marks += USELESS
        return marks

    def is_near_tie(self, difference: Difference) -> bool:
        return difference.gap < NEAR_TIE[self.setting.dtype]

    def judge(self, judge: Judge, prompts: Sequence[list[int]]) -> None:
        """Find the differences of all answers."""
        for answer in self.answers:
            for index, ids in enumerate(answer.outputs):
                difference = judge.first_difference(index, prompts[index], ids)
                if difference is not None:
                    self.differences.append(difference)

    def to_json(self) -> dict[str, object]:
        return {
            "engine": self.engine,
            **asdict(self.setting),
            "speculative": self.speculative,
            "rates": self.rates,
            "drafted": self.num_drafted,
            "accepted": self.num_accepted,
            "phases": [answer.detail for answer in self.answers],
            "lacks": self.lacks,
            "differences": [asdict(difference) for difference in self.differences],
        }


class Run:
    """One run of the benchmark."""

    def __init__(self, options: argparse.Namespace) -> None:
        target, draft = options.target, options.draft
        if not target:
            target, draft = widened(options.size), DEMO_DRAFT
        self.options = options
        self.target = Path(target)
        self.draft = str(draft)
        """Folder of the draft; empty = engines draft with what they have without one."""
        tokenizer = Tokenizer.from_file(str(self.target / "tokenizer.json"))
        texts = dev_prompts(max([options.prompts, *options.concurrency]))
        self.prompts = [tokenizer.encode(text).ids for text in texts]
        self.cores = sorted(os.sched_getaffinity(0))
        self.arms: list[Arm] = []
        self.absent: dict[str, str] = {}
        """Why an engine was not run."""
        self.versions: dict[str, str] = {}

    def measure(self) -> None:
        """Measure all settings, then judge all greedy answers."""
        options = self.options
        for dtype in options.dtype:
            with contextlib.ExitStack() as running:
                processes = {process.kind.name: process for process in self._started(dtype, running)}
                for concurrency, temperature in itertools.product(options.concurrency, options.temperature):
                    asyncio.run(self._measure_setting(processes, Setting(dtype, temperature, concurrency)))
        for dtype in options.dtype:
            judge = Judge(self.target, dtype)
            for arm in self.arms:
                if arm.setting.dtype == dtype and arm.setting.temperature == 0:
                    arm.judge(judge, self.prompts)

    def _started(self, dtype: str, running: contextlib.ExitStack) -> Iterator[EngineProcess]:
        """Yield the engines of a dtype. `running` closes those that were started, however many failed."""
        for kind in kinds():
            wanted = self.options.engines
            if wanted and not any(name.lower() in kind.name.lower() for name in wanted):
                continue
            reason = missing(kind)
            if reason is not None:
                self.absent[kind.name] = reason
                continue
            process = self._start(kind, dtype, running)
            if process is not None:
                yield process

    def _start(self, kind: Kind, dtype: str, running: contextlib.ExitStack) -> EngineProcess | None:
        folder = WORK / "peer-models" / str(self.target.resolve()).strip("/").replace("/", "-")
        folder.mkdir(parents=True, exist_ok=True)
        (WORK / "bench-logs").mkdir(exist_ok=True)
        setup = Setup(
            target=str(self.target),
            draft=self.draft,
            dtype=dtype,
            num_draft_tokens=self.options.num_draft_tokens,
            cores=self.cores,
            max_concurrency=max(self.options.concurrency),
            context=CONTEXT,
            folder=str(folder),
        )
        log = WORK / "bench-logs" / f"{kind.name.lower().replace(', ', '-').replace(' ', '-')}-{dtype}.log"
        warm_up = Job(self.prompts[:1], 16, 0.0, 1, speculative=False, seed=1)
        began_s = time.perf_counter()
        with contextlib.ExitStack() as starting:
            process = EngineProcess(kind, setup, log)
            starting.callback(process.close)
            try:
                self.versions[kind.name] = process.ready()
                for speculative in (False, True):  # let it compile, allocate and warm up
                    process.run(replace(warm_up, speculative=speculative))
            except EngineFailed as failure:
                self.absent[f"{kind.name}, {dtype}"] = str(failure)
                return None
            running.enter_context(starting.pop_all())
        print(f"{self.versions[kind.name]} is ready after {time.perf_counter() - began_s:.0f} s", flush=True)
        return process

    async def _measure_setting(self, processes: dict[str, EngineProcess], setting: Setting) -> None:
        prompts = self.prompts[: max(self.options.prompts, setting.concurrency)]
        arms = dict[str, Arm]()
        for name in processes:
            for speculative in (False, True):
                arm = Arm(name, speculative, setting, needs_useful_draft=bool(self.draft))
                arms[arm.name] = arm

        async def answer(name: str, unit: int, repetition: int) -> None:
            arm = arms[name]
            if arm.lacks:
                return
            max_tokens, temperature = self.options.max_tokens, setting.temperature
            job = Job(prompts, max_tokens, temperature, setting.concurrency, arm.speculative, seed=1)
            try:
                answer = processes[arm.engine].run(job)
            except EngineFailed as failure:
                answer = str(failure)
            if isinstance(answer, str):
                arm.lacks = answer
            else:
                arm.answers.append(answer)

        await take_turns(list(arms), 1, self.options.repetitions, answer)
        for arm in arms.values():
            print(f"{setting}: {arm.name}: {spread(arm.rates) if arm.rates else arm.lacks}", flush=True)
        self.arms += arms.values()

    def in_setting(self, setting: Setting, speculative: bool) -> dict[str, Arm]:
        """Return the arms of a setting by engine."""
        return {arm.engine: arm for arm in self.arms if (arm.setting, arm.speculative) == (setting, speculative)}


def describe_models(run: Run) -> str:
    size = f"{num_parameters(run.target) / 1e6:.1f}M parameters"
    if not run.options.target:
        size += ": the demo target WIDENED, which has its logits, hence its acceptance, at the cost of a larger model"
    draft = "none: with a draft is what each engine has without one, such as looking n-grams up in prompt and answer"
    if run.draft:
        draft = f"{Path(run.draft).name}, {num_parameters(Path(run.draft)) / 1e6:.2f}M"
    return f"The target {run.target.name} ({size}), the same folder for every engine. The draft: {draft}"


def add_comparison(report: Report, run: Run) -> None:
    """Add the rates of all settings."""
    options = run.options
    report.text(
        f"{describe_models(run)}. K = {options.num_draft_tokens}, {options.max_tokens} tokens an answer, ends of "
        f"sequence ignored, cores {run.cores} for every engine. Rates are tokens of answers over wall time, prompts' "
        "feeding included: the median of the passes and their range. Prefix caches are off. Engines take turns; the "
        "others are stopped meanwhile, but for Outrider's processes, which sleep. ×: Outrider's rate (both workers on "
        "all cores) over that engine's, median of the ratios within a repetition."
    )
    report.text(
        f"{WRONG}: some of its greedy answers in this row are not the target's own (below), nor near-ties. {USELESS}: "
        f"less than {100 * USEFUL:.0f} % of what its draft said was accepted. Such rates are of other work; nothing is "
        "compared with them."
    )
    columns = ("engine", "plain tok/s", "×", "with draft tok/s", "×", "accepted")
    for setting in dict.fromkeys(arm.setting for arm in run.arms):
        plain, drafted = run.in_setting(setting, False), run.in_setting(setting, True)
        rows = list[list[str]]()
        for engine, arm in drafted.items():
            row = [engine, *rate_cells(plain[engine], plain.get(OURS)), *rate_cells(arm, drafted.get(OURS))]
            rows.append([*row, f"{100 * arm.num_accepted / arm.num_drafted:.0f} %" if arm.num_drafted else ""])
        report.table(str(setting), columns, rows)


def rate_cells(arm: Arm, ours: Arm | None) -> list[str]:
    """Return an arm's rate, and ours over it where they may be compared."""
    if not arm.rates:
        return ["n/a", ""]
    rate = f"{spread(arm.rates)} {arm.marks}".rstrip()
    if ours is None or not ours.rates or arm.marks:
        return [rate, ""]
    ratios = [own / other for own, other in zip(ours.rates, arm.rates, strict=False)]
    return [rate, f"{statistics.median(ratios):.2f}"]


def add_engines(report: Report, run: Run) -> None:
    """Add the engines' versions, and what is absent."""
    report.text("## Engines\n\n" + "\n".join(f"- {name}: {text}" for name, text in run.versions.items()))
    lines = [f"- {name}: {reason}" for name, reason in run.absent.items()]
    lines += sorted({f"- {arm.name}: {arm.lacks}" for arm in run.arms if arm.lacks})
    if lines:
        report.text("Absent, or n/a above:\n\n" + "\n".join(lines))


def add_differences(report: Report, run: Run) -> None:
    """Add how many greedy answers are the target's own, and the first differences of the others."""
    greedy = [arm for arm in run.arms if arm.setting.temperature == 0 and arm.answers]
    if not greedy:
        return
    num_answers = sum(arm.num_answers for arm in greedy)
    num_wrong = sum(len(arm.differences) for arm in greedy)
    report.text(
        f"## Greedy answers\n\n{num_answers} answers of all engines, each token judged by transformers' forward over "
        f"the whole answer: {num_answers - num_wrong} are the target's own from end to end."
    )
    own, differences = list[list[str]](), list[list[str]]()
    for arm in greedy:
        where = [arm.name, str(arm.setting)]
        own.append([*where, f"{arm.num_answers - len(arm.differences)} of {arm.num_answers}"])
        for each in arm.differences:
            gap = f"{each.gap:.1e}{'' if arm.is_near_tie(each) else ' (no near-tie)'}"
            row = [str(each.prompt), str(each.position), str(each.expected), str(each.found)]
            differences.append([*where, *row, gap])
    report.table("Answers that are the target's own", ("engine", "setting", "answers"), own)
    if differences:
        columns = ("engine", "setting", "prompt", "position", "best", "said", "gap of their logits")
        report.table("First differences", columns, differences)


def measure(report: Report, options: argparse.Namespace) -> None:
    """Measure every engine that is installed."""
    for number in (signal.SIGTERM, signal.SIGHUP):  # engines that are stopped must be woken to end
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    run = Run(options)
    run.measure()
    add_comparison(report, run)
    add_engines(report, run)
    add_differences(report, run)
    report.data |= {"versions": run.versions, "absent": run.absent, "options": vars(options)}
    report.data["cells"] = [arm.to_json() for arm in run.arms]


BENCHMARK = Benchmark(
    "Outrider beside other engines",
    measure,
    {
        "target": Option("", "folder of another target; absent = the demo target, widened to --size"),
        "draft": Option("", "folder of that target's draft model; absent = there is none"),
        "size": replace(SIZE, default="111M"),
        "dtype": replace(DTYPE, default=["float32"]),
        "temperature": [0.0, 1.0],
        "concurrency": [1, 8, 32],
        "num_draft_tokens": 4,
        "prompts": Option(6, "in a pass, at least; more at higher concurrency"),
        "max_tokens": 96,
        "repetitions": 2,
        "engines": Option(list[str](), "parts of names; absent = all that are installed"),
    },
)
