"""Tokens per second of Outrider and of other engines on the same weights, prompts and cores, side by side in one run.

    make bench-peers                                  # or: python -m benchmarks.peers --help
    make bench-peers ARGS=--real                      # on a published model, see models/real

Engines take turns, pass by pass, on the same cores; other engines are stopped meanwhile, so that no thread of theirs
spins. Outrider is several processes and not stopped: it sleeps when it has no work. A pass is every prompt once,
`concurrency` at a time. Ratios are taken within a repetition. Prefix caches are off everywhere, so each pass feeds its
prompts. The report names the modes that an engine lacks, and marks a rate of wrong answers or of a useless draft.

--real: the target is Gemma 3 270M, which has no draft of its family: engines draft with what they have without one.
Two more tables follow: what drafts put on the wire at its vocabulary of 262,144, and what our processes hold.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import math
import os
import signal
import statistics
import sys
import time
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tokenizers import Tokenizer

from benchmarks.common import (
    DEMO_DRAFT,
    DEMO_TARGET,
    RESULTS,
    WORK,
    Report,
    dev_prompts,
    num_parameters,
    spread,
    widened,
    with_interval,
)
from benchmarks.passes import PHASES
from benchmarks.peers.compare import NEAR_TIE, Difference, Judge
from benchmarks.peers.engines import EngineFailed, EngineProcess, Kind, kinds, missing
from benchmarks.peers.protocol import Answer, Job, Setup
from benchmarks.peers.wire import add_wire
from models.real.make import real_model, why_absent

CONTEXT = 1024
"""Tokens of prompt and answer; the longest development prompt has 548."""
ARMS = (False, True)
"""Whether an arm drafts: plain, and with the draft."""
USEFUL = 0.1
"""Least share of drafted tokens accepted; a draft of the demo pair below it does not work as it should."""
WRONG, USELESS = "†", "‡"


@dataclass
class Cell:
    """The passes of one engine, one arm and one setting."""

    rates: list[float] = field(default_factory=list)
    """Tokens per second of each pass."""
    drafted: int = 0
    accepted: int = 0
    phases: dict[str, list[float]] = field(default_factory=dict)
    lacks: str = ""

    @property
    def has_useless_draft(self) -> bool:
        return self.drafted > 0 and self.accepted < USEFUL * self.drafted

    def add(self, answer: Answer) -> None:
        self.rates.append(sum(map(len, answer.outputs)) / answer.elapsed_s)
        self.drafted += answer.num_drafted or 0
        self.accepted += answer.num_accepted or 0
        for name, value in answer.detail.items():
            self.phases.setdefault(name, []).append(value)


@dataclass(frozen=True)
class Setting:
    dtype: str
    temperature: float
    concurrency: int

    def __str__(self) -> str:
        return f"{self.dtype}, T = {self.temperature:g}, concurrency {self.concurrency}"


class Bench:
    """One run; `cells` fill up as it goes."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.report = Report(options.name, "Outrider beside other engines")
        self.cells: dict[tuple[str, Setting, bool], Cell] = defaultdict(Cell)
        self.absent: dict[str, str] = {}
        self.versions: dict[str, str] = {}
        self.greedy: list[tuple[str, Setting, bool, int, list[int]]] = []
        """Engine, setting, arm, index of the prompt, ids."""
        self.target = real_model() if options.real else widened(options.size)
        self.draft = "" if options.real else str(DEMO_DRAFT)
        self.head = head_of_real() if options.real else None
        """Of our second row; None where there is a draft model."""
        tokenizer = Tokenizer.from_file(str((self.target if options.real else DEMO_TARGET) / "tokenizer.json"))
        count = max([options.prompts, *options.concurrency])
        self.prompts = [tokenizer.encode(text).ids for text in dev_prompts(count)]
        self.cores = options.cores or sorted(os.sched_getaffinity(0))

    def run(self) -> None:
        for dtype in self.options.dtype:
            with contextlib.ExitStack() as running:
                processes = self._start(dtype, running)
                for concurrency in self.options.concurrency:
                    for temperature in self.options.temperature:
                        self._setting(processes, Setting(dtype, temperature, concurrency))

    def _start(self, dtype: str, running: contextlib.ExitStack) -> list[EngineProcess]:
        """Start the engines of a dtype. `running` closes those that were started, however many failed."""
        ours = {role: text for role in ("target", "draft") if (text := getattr(self.options, f"ours_{role}"))}
        processes = []
        for kind in kinds(ours, self.options.before, self.head):
            if self.options.engines and not any(name in kind.name.lower() for name in self.options.engines):
                continue
            if (reason := missing(kind)) is not None:
                self.absent[kind.name] = reason
                continue
            if (process := self._start_one(kind, dtype, running)) is not None:
                processes.append(process)
        return processes

    def _start_one(self, kind: Kind, dtype: str, running: contextlib.ExitStack) -> EngineProcess | None:
        folder = WORK / "peer-models" / ("real" if self.options.real else self.options.size)
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
        started = time.perf_counter()
        log = WORK / "bench-logs" / f"{kind.name.lower().replace(', ', '-').replace(' ', '-')}-{dtype}.log"
        with contextlib.ExitStack() as starting:
            process = EngineProcess(kind, setup, log)
            starting.callback(process.close)
            try:
                self.versions[kind.name] = process.ready()
                for speculative in ARMS:  # let it compile, allocate and warm up
                    process.run(self._job(self.prompts[:1], 16, 0.0, 1, speculative))
            except EngineFailed as failure:
                self.absent[f"{kind.name}, {dtype}"] = str(failure)
                return None
            running.enter_context(starting.pop_all())
        print(
            f"{kind.name} is ready after {time.perf_counter() - started:.0f} s: {self.versions[kind.name]}", flush=True
        )
        return process

    def _job(self, prompts: list[list[int]], num: int, temperature: float, concurrency: int, speculative: bool) -> Job:
        return Job(prompts, num, temperature, concurrency, speculative, seed=1)

    def _setting(self, processes: list[EngineProcess], setting: Setting) -> None:
        """Measure a setting. Where there are more prompts than run at once, the repetitions share them out."""
        repetitions = self.options.repetitions[setting.concurrency]
        everything = self.prompts[: max(self.options.prompts, setting.concurrency)]
        for repetition in range(repetitions):
            share = everything[repetition::repetitions] if setting.concurrency == 1 else everything
            job = self._job(share, self.options.max_tokens, setting.temperature, setting.concurrency, False)
            indices = [self.prompts.index(prompt) for prompt in share]
            order = processes if repetition % 2 == 0 else processes[::-1]
            for process in order:
                for speculative in ARMS:
                    self._pass(process, setting, job, speculative, indices)
        self._print_progress(setting)

    def _pass(self, process: EngineProcess, setting: Setting, job: Job, speculative: bool, indices: list[int]) -> None:
        name = process.kind.name
        cell = self.cells[name, setting, speculative]
        if cell.lacks:
            return
        try:
            answer = process.run(Job(**asdict(job) | {"speculative": speculative}))
        except EngineFailed as failure:
            answer = str(failure)
        if isinstance(answer, str):
            cell.lacks = answer
            return
        cell.add(answer)
        if setting.temperature == 0:
            for index, ids in zip(indices, answer.outputs, strict=True):
                self.greedy.append((name, setting, speculative, index, ids))

    def _print_progress(self, setting: Setting) -> None:
        for (name, other, speculative), cell in self.cells.items():
            if other == setting:
                rates = spread(cell.rates) if cell.rates else cell.lacks
                print(f"{setting}: {name}{', with draft' * speculative}: {rates}", flush=True)

    @functools.cached_property
    def differences(self) -> list[tuple[str, Setting, bool, Difference]]:
        """Differences in all greedy answers. Read it when everything has run: it loads the target."""
        found, judges = [], {}
        for name, setting, speculative, index, ids in self.greedy:
            if setting.dtype not in judges:
                judges[setting.dtype] = Judge(self.target, setting.dtype)
            difference = judges[setting.dtype].first_difference(index, self.prompts[index], ids)
            if difference is not None:
                found.append((name, setting, speculative, difference))
        return found

    def marks(self, name: str, setting: Setting, speculative: bool) -> str:
        """Return the marks of a rate that must not be compared; empty where it may."""
        wrong = any(
            each[:3] == (name, setting, speculative) and each[3].gap >= NEAR_TIE[setting.dtype]
            for each in self.differences
        )
        useless = bool(self.draft) and self.cells[name, setting, speculative].has_useless_draft
        return WRONG * wrong + USELESS * useless


def head_of_real() -> Path:
    return real_model() / "eagle3"


def _models(bench: Bench) -> str:
    size = num_parameters(bench.target) / 1e6
    if bench.options.real:
        return (
            f"Gemma 3 270M ({size:.1f}M parameters with its tied rows counted once, unpacked from 4 to 8 bits), the "
            "same folder for every engine, and prompts cut by its own tokenizer. It has no draft model of its family: "
            "with a draft is what each engine has without one, looking n-grams up in prompt and answer"
        )
    return (
        f"The demo pair, its target WIDENED to {size:.1f}M parameters (the demo target's logits, hence its acceptance, "
        f"at the cost of a larger model), the draft {num_parameters(DEMO_DRAFT) / 1e6:.2f}M"
    )


def add_comparison(bench: Bench) -> None:
    report, options = bench.report, bench.options
    report.text(
        f"{_models(bench)}. K = "
        f"{options.num_draft_tokens}, {options.max_tokens} tokens an answer, ends of sequence ignored, cores "
        f"{bench.cores} for every engine. Rates are tokens of answers over wall time, prompts' feeding included: the "
        "median of the passes and their range. At concurrency 1 the passes share out the prompts, so that their range "
        "is the prompts' more than the machine's. Prefix caches are off. Engines take turns; the others are stopped "
        "meanwhile, but for Outrider's processes, which sleep. ×: Outrider's rate (both workers on all cores) over "
        "that engine's, median of the ratios within a repetition."
    )
    useless = f"{USELESS}: less than {100 * USEFUL:.0f} % of what its draft said was accepted. " if bench.draft else ""
    report.text(
        f"{WRONG}: some of its greedy answers in this row are not the target's own (below), nor near-ties. {useless}"
        "Such rates are of other work; nothing is compared with them."
    )
    settings = list(dict.fromkeys(setting for _, setting, _ in bench.cells))
    for setting in settings:
        report.table(
            str(setting), ("engine", "plain tok/s", "×", "with draft tok/s", "×", "accepted"), _rows(bench, setting)
        )
    if options.before:
        _write_before(bench, settings)
    _write_absent(bench)
    _write_profile(bench, settings)
    _write_differences(bench)
    report.data |= {"versions": bench.versions, "absent": bench.absent, "options": vars(options)}
    report.data["cells"] = [
        {"engine": name, **asdict(setting), "speculative": speculative, **asdict(cell)}
        for (name, setting, speculative), cell in bench.cells.items()
    ]


def _rows(bench: Bench, setting: Setting) -> list[list[str]]:
    rows = []
    for name in dict.fromkeys(name for name, other, _ in bench.cells if other == setting):
        row = [name]
        for speculative in ARMS:
            cell = bench.cells[name, setting, speculative]
            ours = bench.cells.get(("Outrider", setting, speculative), Cell())
            marks = bench.marks(name, setting, speculative)
            ratios = [a / b for a, b in zip(ours.rates, cell.rates, strict=False)] if not marks else []
            row += [f"{spread(cell.rates)} {marks}".rstrip() if cell.rates else "n/a"]
            row += [f"{statistics.median(ratios):.2f}" if ratios else ""]
        drafted = bench.cells[name, setting, True]
        rows.append([*row, f"{100 * drafted.accepted / drafted.drafted:.0f} %" if drafted.drafted else ""])
    return rows


def _write_before(bench: Bench, settings: list[Setting]) -> None:
    """Compare this commit with an earlier one: each row's ratio of passes that ran side by side, and all rows' mean."""
    rows, means = [], []
    for setting in settings:
        for speculative in ARMS:
            now, then = (
                bench.cells[name, setting, speculative].rates
                for name in ("Outrider", f"Outrider at {bench.options.before}")
            )
            if ratios := [math.log(a / b) for a, b in zip(now, then, strict=False)]:
                mean, low, high = (math.exp(each) for each in with_interval(ratios))
                means.append(mean)
                name = f"{setting}{', with draft' * speculative}"
                rows.append([name, str(len(ratios)), f"{mean:.3f}", f"{low:.3f} to {high:.3f}"])
    heading = f"This commit over {bench.options.before}: geometric mean of pairs of passes, and its 95 % interval"
    bench.report.table(heading, ("row", "pairs", "ratio", "interval"), rows)
    bench.report.text(f"Geometric mean over the rows: {statistics.geometric_mean(means):.3f}.")
    bench.report.data["before"] = rows


def _write_absent(bench: Bench) -> None:
    lines = [f"- {name}: {reason}" for name, reason in bench.absent.items()]
    lacks = {(name, speculative, cell.lacks) for (name, _, speculative), cell in bench.cells.items() if cell.lacks}
    lines += [f"- {name}{', with draft' * speculative}: {reason}" for name, speculative, reason in sorted(lacks)]
    versions = [f"- {name}: {text}" for name, text in bench.versions.items()]
    bench.report.text("## Engines\n\n" + "\n".join(versions))
    if lines:
        bench.report.text("Absent, or n/a above:\n\n" + "\n".join(lines))


def _write_profile(bench: Bench, settings: list[Setting]) -> None:
    """Write where our rounds' time goes, for the rows that another engine leads."""
    rows = []
    for setting in settings:
        for speculative in ARMS:
            rates = {
                name: statistics.median(cell.rates)
                for (name, other, arm), cell in bench.cells.items()
                if (other, arm) == (setting, speculative) and cell.rates and not bench.marks(name, other, arm)
            }
            own = bench.cells.get(("Outrider", setting, speculative))
            best = max(rates, key=lambda name: rates[name], default="Outrider")
            if own is None or not own.rates or best.startswith("Outrider"):
                continue
            shares = [f"{100 * statistics.median(own.phases[name]):.0f} %" for name in PHASES]
            rows.append([f"{setting}{', with draft' * speculative}", best, *shares])
    if rows:
        heading = "Where our time goes, in rows that another leads"
        bench.report.table(heading, ("row", "fastest", "held for drafts", "verify", "overhead"), rows)


def _write_differences(bench: Bench) -> None:
    differences = bench.differences
    answers = len(bench.greedy)
    if not answers:
        return
    text = (
        f"## Greedy answers\n\n{answers} answers of all engines, each token judged by transformers' forward over the "
        f"whole answer: {answers - len(differences)} are the target's own from end to end."
    )
    bench.report.text(text)
    asked = Counter((name, speculative, str(setting)) for name, setting, speculative, _, _ in bench.greedy)
    wrong = Counter((name, speculative, str(setting)) for name, setting, speculative, _ in differences)
    own = [
        [f"{name}{', with draft' * speculative}", setting, f"{count - wrong[name, speculative, setting]} of {count}"]
        for (name, speculative, setting), count in asked.items()
    ]
    if own:
        bench.report.table("Answers that are the target's own", ("engine", "setting", "answers"), own)
    if differences:
        rows = [
            [
                f"{name}{', with draft' * speculative}",
                str(setting),
                *(str(each) for each in (d.prompt, d.position, d.expected, d.found)),
                f"{d.gap:.1e}{'' if d.gap < NEAR_TIE[setting.dtype] else ' (no near-tie)'}",
            ]
            for name, setting, speculative, d in differences
        ]
        columns = ("engine", "setting", "prompt", "position", "best", "said", "gap of their logits")
        bench.report.table("First differences", columns, rows)
    bench.report.data["differences"] = [
        {"engine": name, **asdict(setting), "speculative": speculative, **asdict(d)}
        for name, setting, speculative, d in differences
    ]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--real", action="store_true", help="the published model of make real-model as the target")
    parser.add_argument("--size", default="111M", choices=["94M", "111M", "1b"], help="of the widened target")
    parser.add_argument("--dtype", nargs="+", default=["float32"], choices=["float32", "bfloat16"])
    parser.add_argument("--temperature", nargs="+", type=float, default=[0.0, 1.0])
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("-K", "--num-draft-tokens", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=6, help="in a pass, at least; more at higher concurrency")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument(
        "--repetitions",
        nargs="+",
        type=int,
        default=[3, 2, 1],
        help="passes at each concurrency in turn, the last holds for the rest; at 1 they share out the prompts",
    )
    parser.add_argument("--engines", nargs="+", type=str.lower, help="parts of names; absent = all that are installed")
    parser.add_argument(
        "--before", metavar="COMMIT", help="run that commit of ours beside this one, and compare the two"
    )
    parser.add_argument("--cores", nargs="+", type=int, help="for every engine; absent = all of this process")
    parser.add_argument("--ours-target", type=str, default="", help="settings of our target, as JSON")
    parser.add_argument("--ours-draft", type=str, default="", help="settings of our draft, as JSON")
    parser.add_argument("--quick", action="store_true", help="greedy, concurrency 1 and 8, short answers, one pass")
    parser.add_argument("--name", help="of the result's files; absent = peers, or peers-real")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder to write to")
    if parser.parse_known_args()[0].quick:  # explicit options still hold
        parser.set_defaults(temperature=[0.0], concurrency=[1, 8], prompts=2, max_tokens=24, repetitions=[1])
    options = parser.parse_args()
    given = options.repetitions
    options.repetitions = {c: given[min(i, len(given) - 1)] for i, c in enumerate(options.concurrency)}
    options.name = options.name or ("peers-real" if options.real else "peers")
    return options


def main() -> int:
    options = parse()
    if options.real and (reason := why_absent()) is not None:
        print(reason, file=sys.stderr)
        return 3
    for number in (signal.SIGTERM, signal.SIGHUP):  # engines that are stopped must be woken to end
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    bench = Bench(options)
    bench.run()
    add_comparison(bench)
    if options.real:
        add_wire(bench.report, bench.target, head_of_real(), bench.prompts, bench.cores, options)
    bench.report.write(options.results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
