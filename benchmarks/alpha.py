"""How well each drafter guesses the demo target: Leviathan et al.'s Table 3 for this pair, with its order and bounds.

    make bench-alpha                                  # or: python -m benchmarks alpha --help

Runs `outrider alpha` on the first held-out prompts: at every token that the target writes, each drafter's law is
compared with the target's. The results are shares, not times: they depend on the pair, the prompts and the text of
unigram and bigram, and on no machine. The exit code is 1 when an expectation is violated: see `violations`.
"""

from __future__ import annotations

import argparse
import itertools
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.common import DEMO_DRAFT, DEMO_TARGET, DTYPE, REPO, Report, dev_prompts
from benchmarks.runner import Benchmark
from outrider.lab.alpha import measure, parse_drafter

ORDER = ("model", "bigram", "unigram")
"""The paper's order, the best first."""
NEAR = 0.1
"""Most by which coupled may keep less than rejection's 1 - TV; the proven least, (1 - TV) / (1 + TV), is up to 0.172
less."""
ROUNDING = 1e-6
CODE = ("outrider", "gateway", "draft_service", "target_service", "deploy", "models", "benchmarks", "tests")
"""Folders whose Python is counted: the demo pair writes Python, and was not trained on this."""


@dataclass(frozen=True)
class Share:
    """A mean with half its interval of 95 %; NaN = too few guesses for it, so that no comparison holds."""

    mean: float
    error: float

    @classmethod
    def of(cls, estimate: Mapping[str, float | None]) -> Share:
        """Read an estimate of `outrider alpha --json`."""
        mean, error = estimate["mean"], estimate["error"]
        return cls(math.nan if mean is None else mean, math.nan if error is None else error)

    def minus(self, other: Share) -> Share:
        """Return the difference, with the interval of independent samples.

        The interval of the same prompts is narrower where prompts that are easy for one are easy for the other.
        """
        return Share(self.mean - other.mean, math.hypot(self.error, other.error))

    def __str__(self) -> str:
        return f"{self.mean:.3f}±{self.error:.3f}"


@dataclass(frozen=True)
class Row:
    """The figures of one drafter at one temperature."""

    temperature: float
    drafter: str
    alpha: Share
    """1 - TV, the share that rejection keeps."""
    coupled: Share
    bound: Share
    """(1 - TV) / (1 + TV), the proven least of `coupled`."""
    greedy: Share
    drafted: float
    """Share of the tokens for which there was a guess; the others are in no mean."""
    num_tokens: int

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Row:
        """Read a row of `outrider alpha --json`."""
        shares = {name: Share.of(row[name]) for name in ("alpha", "coupled", "bound", "greedy")}
        facts = {"temperature": row["setting"]["temperature"], "drafter": str(row["drafter"]).partition(":")[0]}
        return cls(**facts, **shares, drafted=row["drafted"]["mean"], num_tokens=row["num_tokens"])

    def __str__(self) -> str:
        return f"{self.drafter} at T = {self.temperature:g}"


def steps(rows: Sequence[Row]) -> Iterator[tuple[Row, Row]]:
    """Yield neighbours in the paper's order: the drafter that should be better, and the one below it."""
    by_place = {(row.temperature, row.drafter): row for row in rows}
    for temperature in sorted({row.temperature for row in rows}):
        for better, worse in itertools.pairwise(ORDER):
            yield by_place[temperature, better], by_place[temperature, worse]


def violations(rows: Sequence[Row]) -> list[str]:
    """Return what violates the paper's order, by more than the interval of the difference, or coupled's bounds.

    Coupled must lie between its bounds, as far as its interval shows, and near the upper one.
    """
    found = []
    for one, other in steps(rows):
        gain = one.alpha.minus(other.alpha)
        if not gain.mean > gain.error:
            found.append(f"{one} is not above {other}: alpha differs by {gain}")
    for row in rows:
        mean, error = row.coupled.mean, row.coupled.error
        if not mean + error >= row.bound.mean - ROUNDING:
            found.append(f"{row}: coupled {row.coupled} is below its bound {row.bound}")
        if not mean - error <= row.alpha.mean + ROUNDING:
            found.append(f"{row}: coupled {row.coupled} is above 1 - TV, {row.alpha}")
        if not mean >= row.alpha.mean - NEAR:
            found.append(f"{row}: coupled {row.coupled} is not within {NEAR:g} of 1 - TV, {row.alpha}")
    return found


def add_rows(report: Report, rows: Sequence[Row]) -> None:
    """Add a table for each temperature, and the paper's order."""
    columns = ("drafter", "rejection: alpha = 1 - TV", "coupled", "coupled, at least", "greedy", "guesses at")
    for temperature in sorted({row.temperature for row in rows}):
        own = [row for row in rows if row.temperature == temperature]
        cells = list[list[str]]()
        for row in own:
            shares = [str(share) for share in (row.alpha, row.coupled, row.bound, row.greedy)]
            cells.append([row.drafter, *shares, f"{100 * row.drafted:.0f} %"])
        report.table(f"T = {temperature:g}, {own[0].num_tokens} tokens of the target", columns, cells)
    order = list[list[str]]()
    for one, other in steps(rows):
        times = f"{one.alpha.mean / other.alpha.mean:.1f}" if other.alpha.mean else ""
        order.append([f"{one}, over {other.drafter}", str(one.alpha.minus(other.alpha)), times])
    report.table("The paper's order", ("drafters", "alpha more", "times"), order)


def read_code() -> tuple[str, int]:
    """Return the text of all Python files below CODE, by name, and how many they are."""
    files = list[Path]()
    for folder in CODE:
        files += sorted((REPO / folder).rglob("*.py"))
    return "\n".join(file.read_text(encoding="utf-8") for file in files), len(files)


def measure_drafters(report: Report, options: argparse.Namespace) -> list[str]:
    """Measure all drafters on the prompts. Returns the violations."""
    text, num_files = read_code()
    report.text(
        f"The demo pair, {options.dtype}; {options.prompts} prompts of held-out text, {options.max_tokens} tokens that "
        f"the target writes to each. Unigram and bigram are counted in {num_files} files, {len(text)} characters: "
        f"{', '.join(CODE)}. Means over the tokens for which a drafter has a guess; after ± the "
        "interval of 95 %, for which prompts are what is independent."
    )
    with tempfile.TemporaryDirectory() as folder:
        counted = Path(folder) / "text.py"
        counted.write_text(text, encoding="utf-8")
        drafts = (f"model:{DEMO_DRAFT}", f"bigram:{counted}", f"unigram:{counted}", "ngram", "lookup")
        task = {
            "target": str(DEMO_TARGET),
            "drafters": [parse_drafter(draft) for draft in drafts],
            "prompts": dev_prompts(options.prompts),
            "max_tokens": options.max_tokens,
            "settings": [{"temperature": each} for each in options.temperatures],
            "dtype": options.dtype,
            "device": "cpu",
        }
        measured_rows = measure(task, Console(stderr=True))
    rows = [Row.of(row) for row in measured_rows]
    add_rows(report, rows)
    report.data["rows"] = measured_rows
    return violations(rows)


BENCHMARK = Benchmark(
    "How well drafters guess the target",
    measure_drafters,
    {
        "prompts": 48,
        "max_tokens": 128,
        "temperatures": [0.0, 1.0],
        "dtype": DTYPE,
    },
    well="No violation: model above bigram above unigram, by more than the interval; coupled not below (1 - TV) / (1 + "
    f"TV) nor above 1 - TV, and within {NEAR:g} of it.",
)
