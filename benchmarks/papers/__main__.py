"""Print Tables 1 to 5 of Leviathan, Kalman and Matias (2023) beside our pairs' numbers, and draw Figures 2 to 4.

    make papers                                       # or: python -m benchmarks.papers --help

Reads the newest stored measurement (`make bench-papers`), and writes docs/reports/papers.md and its pictures.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.common import REPO, RESULTS
from benchmarks.papers import stored
from benchmarks.papers.document import document
from benchmarks.papers.figures import TITLES, draw


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder with the stored measurement")
    parser.add_argument("--docs", type=Path, default=REPO / "docs" / "reports", help="folder to write to")
    options = parser.parse_args()
    path = stored.newest(options.results)
    if path is None:
        sys.exit(f"{options.results} holds no {stored.NAME}-*.json: measure first, make bench-papers (20 minutes)")
    measured, facts = stored.read(path)
    draw(measured, options.docs / "images")
    text = document(measured, facts, path.name, {title: f"images/{name}" for name, title in TITLES.items()})
    print(text)
    (options.docs / "papers.md").write_text(text, encoding="utf-8")
    print(f"written: {options.docs / 'papers.md'}, {', '.join(TITLES)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
