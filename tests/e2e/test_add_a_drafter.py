"""docs/add-a-drafter.md, followed to the letter in a copy of the product: three files, and the drafter drafts."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forked import REPO

PAGE = REPO / "docs" / "add-a-drafter.md"
PARTS = ("outrider", "gateway", "target_service", "draft_service", "deploy", "models/demo")
BLOCK = re.compile(r'^```(python|diff) title="([^"]+)"\n(.*?)^```$', re.MULTILINE | re.DOTALL)


@pytest.fixture
def product(tmp_path: Path) -> Path:
    for part in PARTS:
        shutil.copytree(REPO / part, tmp_path / part, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def follow(page: str, product: Path) -> set[str]:
    """Do what the page says; return the files of the product that it touches."""
    touched = set[str]()
    for kind, name, text in BLOCK.findall(page):
        path = product / name
        if kind == "python":
            assert not path.exists(), f"{name} is there already"
            path.write_text(text)
        else:
            change(path, text.splitlines())
        if name.startswith(PARTS):
            touched.add(name)
    return touched


def change(path: Path, lines: list[str]) -> None:
    """Apply a change that is written as a diff without line numbers."""
    before = "".join(f"{line[1:]}\n" for line in lines if not line.startswith("+"))
    after = "".join(f"{line[1:]}\n" for line in lines if not line.startswith("-"))
    source = path.read_text()
    assert source.count(before) == 1, f"{path.name} does not have these lines once:\n{before}"
    path.write_text(source.replace(before, after))


@pytest.mark.slow
def test_a_drafter_is_added_in_three_files_by_the_page_alone(product: Path) -> None:
    touched = follow(PAGE.read_text(), product)
    assert touched == {
        "outrider/drafting/repeat.py",
        "outrider/wire/requests/drafters.py",
        "outrider/engine/drafter_table.py",
    }
    ended = subprocess.run(
        (sys.executable, "try.py"),
        cwd=product,
        env={**os.environ, "PYTHONPATH": str(product)},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    plain, drafted = (line.split("\t") for line in ended.stdout.splitlines())
    assert drafted[0] == plain[0]
    assert int(plain[1]) == 0 and int(drafted[1]) > 0
