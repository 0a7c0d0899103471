"""Writes docs/reports/laws.md and .json: `python -m tests.law.table`. What the tests of the law tested, and what came.

The tests record their rows as properties of their reports, which pytest hands on from process to process. This module
imports nothing that pytest would rather import itself.
"""

import argparse
import json
import platform
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

REPO = Path(__file__).resolve().parents[2]
DOCUMENT = REPO / "docs" / "reports" / "laws.md"
ENGINE_TESTS = REPO / "tests" / "unit" / "outrider" / "engine"
ENUMERATIONS = (
    ENGINE_TESTS / "sampling" / "test_acceptance_law.py",
    ENGINE_TESTS / "sampling" / "test_overlap_law.py",
    ENGINE_TESTS / "speculation" / "test_growing_tree.py",
)
"""Tests outside of this folder that compare laws in full."""
CHI_SQUARE, ENUMERATED = "chi_square", "enumerated"
"""Names of the properties."""
Row = dict[str, Any]
"""What JSON can hold."""
UNDER_LEASES = (
    "## When the target takes what has arrived",
    "A target steps by itself and verifies the draft tokens that lie under its committed tokens by then. Under greedy "
    "and coupled the output does not depend on drafts at all. Under rejection it keeps the target's law as long as "
    "*whether a token is verified does not depend on the token itself, nor on a random number that is still to be "
    "used*. It may depend on times, on earlier tokens and on the law that the token is drawn from. So:",
    "- The draft grows and sends its tree by counts, times and committed tokens alone, and messages have a fixed width "
    "for what was drawn: none is longer, later or left out for the value in it. Where a "
    "table drafts for the draft, what follows a token comes sooner if that was guessed: the token leaves before.\n"
    "- A chain is drawn with numbers of its *segment*: the committed length at which it began. Where the target draws "
    "the chain's next token itself, with no draft to look at, the chain goes on: its numbers are unseen. After any "
    "other token a new segment begins. What is recovered is never the draft in whose place it comes, by block neither: "
    "no number that was looked at is looked at again.\n"
    "- *Keys*, the ids that the draft thinks the target may draw itself, are never verified. What follows a key is a "
    "segment of its own: at numbers of the chain beside it block verification has looked. The target draws its own "
    "tokens, plain, bonus or recovered, with numbers of the position, which the draft knows and by which it ranks the "
    "keys of a place; across places, and for what is drawn, they decide nothing.\n"
    "- A state has one proposal. The longer of two would be chosen for its value. What the target drafts "
    "itself is drawn with numbers of a purpose of their own, once it is known how many of it are verified.\n"
    "- Of several drafters a step verifies the one that promises the most tokens: by acceptance probabilities that "
    "were learnt from earlier steps, and by how long its chain might have been, not by how long it is. Whether a draft "
    "worker is asked follows from what earlier verdicts accepted of it.\n"
    "- Of siblings those count that have arrived, from the first that was drawn on.",
    "Outside of this promise is a draft that takes longer to send one token than another: that sleeps, or is stopped, "
    "between the draw and the push, by the value drawn. Such a delay shifts the law by at most the share of steps that "
    "begin within it: by 0.00005 for 1 µs of steps of 20 ms. A law that is sent as its entries (`topk`, or under "
    "top-k, top-p and min-p) is harmless: how many these are depends on earlier tokens alone.",
)


def enumerated_row(rule: str, where: str, num_probabilities: int, largest: float) -> Row:
    """One law compared in full. largest: difference of a probability from the target's."""
    return {"rule": rule, "where": where, "probabilities": num_probabilities, "largest": largest}


def joined(rows: Sequence[Row]) -> list[Row]:
    """Enumerations by rule and place: how many laws, and the rest added up."""
    by_key: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        by_key[row["rule"], row["where"]].append(row)
    return [
        {
            "rule": rule,
            "where": where,
            "laws": len(found),
            "probabilities": sum(row["probabilities"] for row in found),
            "largest": max(row["largest"] for row in found),
        }
        for (rule, where), found in sorted(by_key.items())
    ]


class Collector:
    """A pytest plugin: rows of the tests that passed."""

    def __init__(self) -> None:
        self.rows: dict[str, list[Row]] = defaultdict(list)
        self._failed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """The report of the teardown has what the test and its fixtures recorded."""
        if report.failed:
            self._failed.add(report.nodeid)
        if report.when == "teardown" and report.nodeid not in self._failed:
            for name, value in report.user_properties:
                self.rows[name].append(value)


def markdown(document: Mapping[str, Any]) -> str:
    tests, exact = document["chi_square"], document["enumerated"]
    windows = [each for row in tests for each in row["windows"].values() if each["degrees"]]
    least = min(each["p"] for each in windows)
    chance = 1 - (1 - least) ** len(windows)
    head = [
        "# Laws that were tested",
        f"Generated by `make laws` on {document['date']} with {document['software']}; not to be edited."
        + (f" Rows of cases that came later were added on {document['added']}." if "added" in document else ""),
        "Each line is an acceptance rule, who drafts and the sampling parameters. Answers of about four tokens over a "
        "vocabulary of eight are drawn through real services, and their first three and last three tokens compared "
        "with the target's law, which transformers computes without cache. Target and draft are unrelated random "
        "models. The seeds are fixed. That broken rules fail the same test: `tests/law`.",
        "By block is how rejection looks at drafts; by token is how it looks at them under lenience, here without any.",
        f"{len(windows)} chi-square tests. The smallest p-value is {least:.2g}; of as many sound ones the smallest is "
        f"below that with a probability of {chance:.2f}.",
        "## Through the services",
        _table(
            (
                "rule",
                "drafts",
                "K or tree",
                "sampling parameters",
                "answers",
                "first three: χ² / df",
                "p",
                "last three: χ² / df",
                "p",
            ),
            [_cells(row) for row in tests],
        ),
        "A lenient answer is compared with the law that lenience allows, and is shown not to have the target's.",
        *UNDER_LEASES,
        "## By enumeration",
        "Every outcome of a round, with its probability as measured from the functions that serve, against the law.",
        _table(
            ("rule", "code", "laws", "probabilities", "largest difference"),
            [
                (row["rule"], row["where"], str(row["laws"]), str(row["probabilities"]), f"{row['largest']:.1e}")
                for row in exact
            ],
        ),
    ]
    return "\n\n".join(head) + "\n"


def _cells(row: Row) -> tuple[str, ...]:
    encoding = f" ({row['encoding']})" if row["encoding"] else ""
    fits = (
        cell
        for each in row["windows"].values()
        for cell in (f"{each['statistic']:.1f} / {each['degrees']}", f"{each['p']:.3f}")
    )
    return (row["rule"], row["drafts"] + encoding, str(row["k"]), row["parameters"], str(row["answers"]), *fits)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (columns, ["---"] * len(columns), *rows))


def as_json(document: Mapping[str, Any]) -> str:
    """A row a line."""
    parts = []
    for name, value in document.items():
        rows = [json.dumps(each) for each in value] if isinstance(value, list) else None
        parts.append(f'"{name}": ' + (json.dumps(value) if rows is None else "[\n" + ",\n".join(rows) + "\n]"))
    return "{\n" + ",\n".join(parts) + "\n}\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--document", type=Path, default=DOCUMENT, help="to write; the JSON file lies beside it")
    parser.add_argument("--add", action="store_true", help="keep the document's rows, but for those of what now runs")
    options, pytest_arguments = parser.parse_known_args(arguments)
    collector = Collector()
    tests = [str(REPO / "tests" / "law"), *(str(path) for path in ENUMERATIONS)]
    ignored = ("--ignore", str(REPO / "tests" / "law" / "test_offered.py"))  # it reads what is to be written
    patience = ("--timeout", "900")  # all that is wanted are counts, on however busy a machine
    every_case = ("-m", "slow or not slow", "--deselect", "tests/law/test_law.py::test_larger_samples")
    code = int(pytest.main([*tests, *ignored, *every_case, *patience, *pytest_arguments], plugins=[collector]))
    if code or not collector.rows[CHI_SQUARE] or not (options.add or collector.rows[ENUMERATED]):
        print(f"{options.document} is left as it was: not all tests ran and passed", file=sys.stderr)
        return code or 1
    libraries = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
    if options.add:
        return _add(options.document, collector.rows[CHI_SQUARE])
    document = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "software": f"Python {platform.python_version()}, {libraries}",
        "chi_square": collector.rows[CHI_SQUARE],
        "enumerated": joined(collector.rows[ENUMERATED]),
    }
    _write(options.document, document)
    return 0


def _add(path: Path, rows: Sequence[Row]) -> int:
    """Put rows behind the document's, in place of those of the same cases."""
    document = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    new = {_case_of(row) for row in rows}
    document["chi_square"] = [*(row for row in document["chi_square"] if _case_of(row) not in new), *rows]
    document["added"] = datetime.now(UTC).strftime("%Y-%m-%d")
    _write(path, document)
    return 0


def _case_of(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("group", "rule", "drafts", "k", "encoding", "parameters"))


def _write(path: Path, document: Mapping[str, Any]) -> None:
    path.write_text(markdown(document), encoding="utf-8")
    path.with_suffix(".json").write_text(as_json(document), encoding="utf-8")
    print(f"written: {path} and .json")


if __name__ == "__main__":
    sys.exit(main())
