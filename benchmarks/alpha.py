"""How well each drafter guesses the demo target: Leviathan et al.'s Table 3 for this pair, with its order and bounds.

    make bench-alpha                                  # or: python -m benchmarks.alpha --help

Runs `outrider alpha` on the first held-out prompts: at every token that the target writes, each drafter's law is
compared with the target's. The results are shares, not times: they depend on the pair, the prompts and the text of
unigram and bigram, and on no machine. The exit code is 1 when an expectation is violated: see `violations`.
"""

from __future__ import annotations

import itertools
import math
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.common import DEMO_DRAFT, DEMO_TARGET, REPO, Report, dev_prompts, parser
from outrider.lab.alpha import format_estimate as as_shown
from outrider.lab.alpha import measure, parse_drafter
from outrider.lab.models.tally import Estimate

MODEL, BIGRAM, UNIGRAM = "model", "bigram", "unigram"
ORDER = (MODEL, BIGRAM, UNIGRAM)
"""The paper's order, the best first."""
NEAR = 0.1
"""Most by which coupled may keep less than rejection's 1 - TV; the proven least, (1 - TV) / (1 + TV), is up to 0.172
less."""
ROUNDING = 1e-6
CODE = ("outrider", "gateway", "draft_service", "target_service", "deploy", "models", "benchmarks", "tests")
"""Folders whose Python is counted: the demo pair writes Python, and was not trained on this."""


def shown(estimate: Estimate) -> str:
    return as_shown(estimate.mean, estimate.error)


def less(one: Estimate, other: Estimate) -> Estimate:
    """Return the difference, with the interval of independent samples.

    The interval of the same prompts is narrower where prompts that are easy for one are easy for the other.
    """
    if one.mean is None or other.mean is None:
        return Estimate(None, None)
    mean = one.mean - other.mean
    if one.error is None or other.error is None:
        return Estimate(mean, None)
    return Estimate(mean, math.hypot(one.error, other.error))


@dataclass(frozen=True)
class Row:
    """The figures of one drafter at one temperature."""

    temperature: float
    drafter: str
    alpha: Estimate
    """1 - TV, the share that rejection keeps."""
    coupled: Estimate
    bound: Estimate
    """(1 - TV) / (1 + TV), the proven least of `coupled`."""
    greedy: Estimate
    drafted: float
    """Share of the tokens for which there was a guess; the others are in no mean."""
    num_tokens: int

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Row:
        """Read a row of `outrider alpha --json`."""
        estimates = {name: Estimate(**row[name]) for name in ("alpha", "coupled", "bound", "greedy")}
        kind = str(row["drafter"]).partition(":")[0]
        return cls(
            row["setting"]["temperature"],
            kind,
            **estimates,
            drafted=row["drafted"]["mean"],
            num_tokens=row["num_tokens"],
        )

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
        gain = less(one.alpha, other.alpha)
        if gain.mean is None or gain.error is None or not gain.mean > gain.error:
            found.append(f"{one} is not above {other}: alpha differs by {shown(gain)}")
    for row in rows:
        if row.alpha.mean is None or row.bound.mean is None or row.coupled.mean is None or row.coupled.error is None:
            found.append(f"{row}: too few guesses to tell")
            continue
        mean, error = row.coupled.mean, row.coupled.error
        if not mean + error >= row.bound.mean - ROUNDING:
            found.append(f"{row}: coupled {shown(row.coupled)} is below its bound {shown(row.bound)}")
        if not mean - error <= row.alpha.mean + ROUNDING:
            found.append(f"{row}: coupled {shown(row.coupled)} is above 1 - TV, {shown(row.alpha)}")
        if not mean >= row.alpha.mean - NEAR:
            found.append(f"{row}: coupled {shown(row.coupled)} is not within {NEAR:g} of 1 - TV, {shown(row.alpha)}")
    return found


def add_rows(report: Report, rows: Sequence[Row]) -> None:
    columns = ("drafter", "rejection: alpha = 1 - TV", "coupled", "coupled, at least", "greedy", "guesses at")
    for temperature in sorted({row.temperature for row in rows}):
        own = [row for row in rows if row.temperature == temperature]
        cells = [
            [row.drafter, *map(shown, (row.alpha, row.coupled, row.bound, row.greedy)), f"{100 * row.drafted:.0f} %"]
            for row in own
        ]
        report.table(f"T = {temperature:g}, {own[0].num_tokens} tokens of the target", columns, cells)
    found = [
        [
            f"{one}, over {other.drafter}",
            shown(less(one.alpha, other.alpha)),
            f"{one.alpha.mean / other.alpha.mean:.1f}",
        ]
        for one, other in steps(rows)
        if one.alpha.mean is not None and other.alpha.mean
    ]
    report.table("The paper's order", ("drafters", "alpha more", "times"), found)


def text_of(paths: Sequence[Path]) -> tuple[str, int]:
    """Return the text of all Python files below folders, by name, and of other files; and how many they are."""
    files = [file for path in paths for file in (sorted(path.rglob("*.py")) if path.is_dir() else [path])]
    return "\n".join(file.read_text(encoding="utf-8") for file in files), len(files)


def named(path: Path) -> str:
    return str(path.relative_to(REPO) if path.is_relative_to(REPO) else path)


def main() -> int:
    made = parser(
        __doc__,
        target=str(DEMO_TARGET),
        draft=str(DEMO_DRAFT),
        prompts=48,
        max_tokens=128,
        temperatures=[0.0, 1.0],
        dtype="float32",
    )
    code = [REPO / each for each in CODE]
    made.add_argument("--text", type=Path, nargs="+", default=code, help="of unigram and bigram: files, folders")
    options = made.parse_args()
    text, num_files = text_of(options.text)
    report = Report("alpha", "How well drafters guess the target")
    report.text(
        f"The demo pair, {options.dtype}; {options.prompts} prompts of held-out text, {options.max_tokens} tokens that "
        f"the target writes to each. Unigram and bigram are counted in {num_files} files, {len(text)} characters: "
        f"{', '.join(map(named, options.text))}. Means over the tokens for which a drafter has a guess; after ± the "
        "interval of 95 %, for which prompts are what is independent."
    )
    with tempfile.TemporaryDirectory() as folder:
        counted = Path(folder) / "text.py"
        counted.write_text(text, encoding="utf-8")
        drafts = (f"model:{options.draft}", f"bigram:{counted}", f"unigram:{counted}", "ngram", "lookup")
        task = {
            "target": options.target,
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
    report.verdict(
        violations(rows),
        "No violation: model above bigram above unigram, by more than the interval; coupled not below (1 - TV) / (1 + "
        f"TV) nor above 1 - TV, and within {NEAR:g} of it.",
    )
    report.write(options.results)
    return 1 if report.data["violations"] else 0


if __name__ == "__main__":
    sys.exit(main())
