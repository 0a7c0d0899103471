"""docs/what-to-know.md: each concept is defined in the file beside it, and the headings count rows and files."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SECTIONS = (ROOT / "docs/what-to-know.md").read_text().split("\n## ")[1:]
HEADING = re.compile(r"(\d+) concepts, (\d+) files to read")
FILE = re.compile(r"`((?:\w+/)*\w+\.(?:py|proto))`")


@pytest.mark.parametrize("section", SECTIONS, ids=[section.partition(":")[0] for section in SECTIONS])
def test_a_section_is_true(section: str) -> None:
    counted = HEADING.search(section)
    assert counted is not None
    text, _, table = section.partition("\n|")
    rows = [line.strip("|").split("|") for line in table.splitlines()[2:] if line.startswith("|")]
    assert len(rows) == int(counted[1])
    assert len(FILE.findall(text)) == int(counted[2])
    for *_, name, _, file in rows:
        path = FILE.search(file)
        assert path is not None, file
        source = (ROOT / path[1]).read_text()
        for concept in re.findall(r"`(\w+)`", name):
            defined = rf"^\s*(?:(?:class|def|message) {concept}\b|(?:self\.)?{concept}\b.* = |{concept}: )"
            assert re.search(defined, source, re.MULTILINE), f"{path[1]} has no {concept}"
