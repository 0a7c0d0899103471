"""Faults that the suite must catch: each a small change of the product, with the tests that are to fail for it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    file: str
    """Path below the repository."""
    old: str
    """Occurs in the file exactly once."""
    new: str
    why: str
    """What users or the laws would lose."""
    tests: tuple[str, ...]
    """Files or node ids, of which one test at least fails. They are run in this order, up to the first failure."""

    def apply(self, text: str) -> str:
        """Raises LookupError where the file no longer says what is to be changed."""
        if (count := text.count(self.old)) != 1:
            raise LookupError(f"{self.file} has the text {count} times, and should have it once:\n{self.old}")
        return text.replace(self.old, self.new)
