"""Faults that `make mutants` plants stay plantable: the text that each changes is in its file, once."""

from __future__ import annotations

from tests.mutants.__main__ import MUTANTS, REPO


def test_every_fault_can_be_planted() -> None:
    for mutant in MUTANTS:
        source = (REPO / mutant.file).read_text(encoding="utf-8")
        assert mutant.apply(source) != source
