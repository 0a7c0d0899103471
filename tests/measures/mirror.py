"""Product files whose tests have their name: `python -m tests.measures.mirror`."""

from pathlib import Path

from tests.measures.lines import REPO

PRODUCT = ("gateway", "draft_service", "target_service", "outrider", "deploy")
GENERATED = "outrider/v1"
MIN_LINES = 60
"""Shorter files are tested with those that call them."""


def product_files() -> list[Path]:
    """Return the product's files of more than MIN_LINES, relative to the repository."""
    paths = (path.relative_to(REPO) for folder in PRODUCT for path in sorted((REPO / folder).rglob("*.py")))
    return [path for path in paths if not path.is_relative_to(GENERATED) and num_lines(path) > MIN_LINES]


def num_lines(path: Path) -> int:
    return len((REPO / path).read_text(encoding="utf-8").splitlines())


def test_of(path: Path) -> Path:
    """Return the file that tests a product's: `tests/unit/gateway/test_tokenizer.py` of `gateway/tokenizer.py`."""
    name = path.parent.name if path.stem == "__main__" else path.stem
    return Path("tests/unit") / path.parent / f"test_{name}.py"


def main() -> None:
    paths = product_files()
    names = {path.name for path in (REPO / "tests").rglob("test_*.py")}
    elsewhere = [path for path in paths if not (REPO / test_of(path)).exists() and test_of(path).name in names]
    without = [path for path in paths if test_of(path).name not in names]
    for path in without:
        print(f"{num_lines(path):5} {path}")
    mirrored = len(paths) - len(without) - len(elsewhere)
    print(f"{len(paths)} files of more than {MIN_LINES} lines: {mirrored / len(paths):.0%} have a test in their place,")
    print(f"{1 - len(without) / len(paths):.0%} a test of their name anywhere")


if __name__ == "__main__":
    main()
