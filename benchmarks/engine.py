"""Time one step: each of our paths over transformers' forward, and over the floor that memory sets.

    make bench-engine                                 # or: python -m benchmarks.engine --help

No services: `ModelRunner.forward` is called directly. Every contestant takes a few steps of each width in turn, until
the time is up. Times are medians; ratios are medians over the rounds, of times of the same round. The floor is the time
to read as many bytes as the weights have, in the same rounds with as many threads.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from benchmarks.common import (
    DEMO_DRAFT,
    DEMO_TARGET,
    RESULTS,
    Report,
    dev_prompts,
    num_parameters,
    random_gemma3_270m,
)
from benchmarks.common import widened as widened_target
from benchmarks.invariance import add_invariance
from benchmarks.steps import (
    Clock,
    Contestant,
    OurSteps,
    ReadSteps,
    interleaved_steps,
    load_ours,
    load_transformers,
    median_ratio,
)
from outrider.wire.errors import ConfigError

CONTEXT = 256
"""Tokens before each step."""
MAX_ROUNDS = 400
PATHS = ("fused", "paged", "dense")
WIDENED = ("94M", "111M", "1b")
GEMMA = "gemma3-270m"
MODELS = ("draft", "target", *WIDENED, GEMMA)


@dataclass(frozen=True)
class Timing:
    """Times of one shape of one model."""

    model: str
    dtype: str
    batch: int
    width: int
    seconds: dict[str, list[float]]
    """Seconds of every round, by name: floor, transformers, and those of our paths that run here."""

    def median_s(self, name: str) -> float:
        return statistics.median(self.seconds[name])

    def over(self, name: str, other: str) -> float:
        return median_ratio(self.seconds[name], self.seconds[other])


class EngineBench:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.report = Report(options.name, "Steps of the engine")
        self.timings: list[Timing] = []
        self.notes: list[str] = []
        tokenizer = Tokenizer.from_file(str(DEMO_TARGET / "tokenizer.json"))
        self.prompt = [i for text in dev_prompts(4) for i in tokenizer.encode(text).ids][:CONTEXT]
        self.clock: Clock = time.thread_time if options.clock == "thread" else time.perf_counter
        torch.set_num_threads(options.threads)

    def model(self, name: str, dtype: str) -> None:
        folder = folder_of(name)
        theirs, num_bytes = load_transformers(folder, dtype, self.prompt)
        contestants: list[Contestant] = [ReadSteps(num_bytes), theirs]
        widths = sorted(self.options.width)
        rounded = [(self.options.paths[0], "int8")] if self.options.int8 else []
        for path, quantization in [(path, "none") for path in self.options.paths] + rounded:
            try:
                contestants.append(
                    load_ours(folder, dtype, path, self.prompt, max(self.options.batch), widths, quantization)
                )
            except ConfigError as error:
                self.notes.append(f"{name}, {dtype}, {path}, quantization {quantization}: {error.message}")
        timings = []
        for batch in self.options.batch:
            taken = interleaved_steps(
                contestants, batch, widths, self.clock, len(widths) * self.options.seconds, MAX_ROUNDS
            )
            for width, seconds in taken.items():
                timings.append(Timing(name, dtype, batch, width, seconds))
                shown = {who: f"{1e3 * timings[-1].median_s(who):.2f} ms" for who in seconds}
                print(f"{name} {dtype} {batch} x {width}: {shown}", flush=True)
        floor_s = statistics.median(timing.median_s("floor") for timing in timings)
        title = (
            f"{name} ({num_parameters(folder) / 1e6:.1f}M parameters, {num_bytes / 1e6:.0f} MB read at "
            f"{num_bytes / floor_s / 1e9:.1f} GB/s), {dtype}"
        )
        self._table(title, timings, contestants)
        self.timings += timings
        del contestants, theirs
        gc.collect()

    def _table(self, title: str, timings: list[Timing], contestants: list[Contestant]) -> None:
        ours = [each for each in contestants if isinstance(each, OurSteps)]
        columns = ["rows x tokens", "floor ms", "transformers ms"]
        for each in ours:
            columns += [f"{each.name} ms", "over transformers", "over floor"]
        rows = []
        for timing in timings:
            row = [
                f"{timing.batch} x {timing.width}",
                *(_ms(timing.median_s(who)) for who in ("floor", "transformers")),
            ]
            for each in ours:
                ratios = (timing.over(each.name, other) for other in ("transformers", "floor"))
                row += [_ms(timing.median_s(each.name)), *(f"{ratio:.2f}" for ratio in ratios)]
            rows.append(row)
        self.report.table(title, columns, rows)
        self._verify_ratios(timings, ours)
        margins = [[each.name, each.margin] for each in ours]
        self.report.table(f"{timings[0].model}, {timings[0].dtype}: self-tests at load", ["path", "logits"], margins)

    def _verify_ratios(self, timings: list[Timing], ours: list[OurSteps]) -> None:
        """Add the cost of a verify beside one token, and of batch invariance beside the fastest path without it."""
        widths = sorted({timing.width for timing in timings})
        by_shape = {(timing.batch, timing.width): timing for timing in timings}
        names = ["transformers", *(each.name for each in ours)]
        rows = []
        for batch in sorted({timing.batch for timing in timings}):
            one, many = by_shape[batch, widths[0]], by_shape[batch, widths[-1]]
            ratios = (median_ratio(many.seconds[name], one.seconds[name]) for name in names)
            rows.append([str(batch), *(f"{ratio:.2f}" for ratio in ratios), *_costs(ours, one, many)])
        if len(widths) > 1:
            heading = f"{timings[0].model}, {timings[0].dtype}: {widths[-1]} tokens over {widths[0]}"
            mode = [f"--batch-invariant over without, {width} token(s)" for width in (widths[0], widths[-1])]
            self.report.table(heading, ["rows", *names, *mode], rows)


def _costs(ours: list[OurSteps], *shapes: Timing) -> list[str]:
    """Return the time of the first batch-invariant path over the fastest other one: below 1 it costs nothing."""
    invariant = next((each.name for each in ours if each.batch_invariant), None)
    others = [each.name for each in ours if not each.batch_invariant]
    if invariant is None or not others:
        return ["n/a"] * len(shapes)
    return [f"{each.over(invariant, min(others, key=each.median_s)):.2f}" for each in shapes]


def folder_of(name: str) -> Path:
    """Return the model's folder, made when it is missing."""
    if name in WIDENED:  # the large one is kept in bfloat16, which its original's weights are
        return widened_target(name, "bfloat16" if name == "1b" else "float32")
    return random_gemma3_270m() if name == GEMMA else {"draft": DEMO_DRAFT, "target": DEMO_TARGET}[name]


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f}"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["draft", "target", "94M", GEMMA], choices=MODELS)
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--width", nargs="+", type=int, default=[1, 6], help="tokens a row; 6 is K + 1")
    parser.add_argument("--paths", nargs="+", default=list(PATHS), choices=PATHS)
    parser.add_argument(
        "--int8", action=argparse.BooleanOptionalAction, default=True, help="the first path with int8 weights, too"
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=4.0, help="for each shape; at least three rounds are taken")
    parser.add_argument("--clock", choices=["wall", "thread"], default="wall", help="thread: CPU time, for one thread")
    parser.add_argument("--no-invariance", action="store_true", help="leave out the table of bits")
    parser.add_argument("--invariance-model", default="target", choices=["draft", "target", *WIDENED])
    parser.add_argument("--name", default="engine", help="of the result's files")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder to write to")
    options = parser.parse_args()
    if options.clock == "thread" and options.threads != 1:
        parser.error("--clock thread sees one thread's time only; add --threads 1")
    return options


def main() -> None:
    options = parse()
    bench = EngineBench(options)
    bench.report.text(
        f"One forward over rows of {CONTEXT} cached tokens each, {options.threads} thread(s), {options.clock} clock. "
        "In each round everyone takes a few steps of each width; times are medians over the rounds, ratios medians of "
        "ratios within a round. `94M`, `111M` and `1b` are the demo target WIDENED to that many parameters, "
        f"`{GEMMA}` has random weights. floor: the time to read as many bytes as the weights have, again and again, "
        "with as many threads. rows x tokens: rows in the batch, new tokens in each. `int8`: weights rounded at load, "
        "compared with the same floor. --batch-invariant over without: the path that the mode takes over the fastest "
        "one that cannot promise it."
    )
    for name in options.models:
        for dtype in options.dtype:
            bench.model(name, dtype)
    if bench.notes:
        bench.report.text("Not available:\n\n" + "\n".join(f"- {note}" for note in bench.notes))
    if not options.no_invariance:
        add_invariance(bench.report, options.invariance_model, options.dtype, options.paths)
    bench.report.data |= {"timings": [asdict(timing) for timing in bench.timings]}
    bench.report.write(options.results)


if __name__ == "__main__":
    main()
